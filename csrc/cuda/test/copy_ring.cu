// The ring through which communication warps move rows and slots, cuda/copy_ring.cuh.
#include "cuda/copy_ring.cuh"
#include "cuda/test/harness.cuh"

namespace mok::cuda::test {
namespace {

// With kAhead, a copy's first vectors are read before the copy before it is given up.
template <bool kAhead>
__global__ void copy_through_ring(const uint8_t* in, int32_t bytes, uint8_t* out) {
  __shared__ CopyRing::Memory memory;
  CopyRing copies(memory);
  const int32_t own = lane_index() * 16;
  int32_t next = own;
  const auto load = [&] {
    copies.load(in + next, bytes - next);
    next += CopyRing::kBytes;
  };
  for (int32_t i = 0; i < CopyRing::kCount; ++i) load();
  uint4 first = load_shared(copies.wait());
  for (int32_t at = own; at - own < bytes; at += CopyRing::kBytes) {
    const uint32_t copy = kAhead ? copies.current() : copies.wait();
    if (!kAhead) first = load_shared(copy);
    *reinterpret_cast<uint4*>(out + at) = first;
    for (int32_t v = 1; v < CopyRing::kVectors; ++v) {
      *reinterpret_cast<uint4*>(out + at + v * CopyRing::kVectorBytes) = load_shared(copy + v * CopyRing::kVectorBytes);
    }
    if (kAhead) first = load_shared(copies.wait_for_next());
    load();
  }
  copies.finish();
}

// Less than one copy, and several turns of the ring. Behind the last byte come zeros, which nobody has read.
TEST(copies) {
  for (int32_t bytes : {16, 496, 528, 2048, 2064, 14336, 40 * 2048 + 1040}) {
    const int32_t whole = (bytes + CopyRing::kBytes - 1) / CopyRing::kBytes * CopyRing::kBytes;
    std::vector<uint8_t> given(whole, kUnwritten), expected(whole);
    for (int32_t i = 0; i < bytes; ++i) given[i] = expected[i] = static_cast<uint8_t>(i * 31 + i / 251);
    for (const auto kernel : {copy_through_ring<false>, copy_through_ring<true>}) {
      Array<uint8_t> in(given), out(whole);
      launch(kernel, 1, 32, 0, in.data(), bytes, out.data());
      expect_equal(out.host(), expected);
    }
  }
}

}  // namespace
}  // namespace mok::cuda::test

int main(int argc, char** argv) { return mok::cuda::test::run(argc, argv); }
