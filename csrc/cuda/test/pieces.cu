// The ring of pieces through which communication warps move rows and slots, cuda/pieces.cuh.
#include "cuda/pieces.cuh"
#include "cuda/test/harness.cuh"

namespace mok::cuda::test {
namespace {

// With kAhead, a piece's first vectors are read before the piece before it is given up.
template <bool kAhead>
__global__ void copy_through_pieces(const uint8_t* in, int32_t bytes, uint8_t* out) {
  __shared__ Pieces::Memory memory;
  Pieces pieces(memory);
  const int32_t own = lane_index() * 16;
  int32_t next = own;
  const auto load = [&] {
    pieces.load(in + next, bytes - next);
    next += Pieces::kBytes;
  };
  for (int32_t i = 0; i < Pieces::kCount; ++i) load();
  uint4 first = load_shared(pieces.wait());
  for (int32_t at = own; at - own < bytes; at += Pieces::kBytes) {
    const uint32_t piece = kAhead ? pieces.current() : pieces.wait();
    if (!kAhead) first = load_shared(piece);
    *reinterpret_cast<uint4*>(out + at) = first;
    for (int32_t v = 1; v < Pieces::kVectors; ++v) {
      *reinterpret_cast<uint4*>(out + at + v * Pieces::kVectorBytes) = load_shared(piece + v * Pieces::kVectorBytes);
    }
    if (kAhead) first = load_shared(pieces.wait_for_next());
    load();
  }
  pieces.finish();
}

// Less than one piece, and several turns of the ring. Behind the last byte come zeros, which nobody has read.
TEST(pieces) {
  for (int32_t bytes : {16, 496, 528, 2048, 2064, 14336, 40 * 2048 + 1040}) {
    const int32_t whole = (bytes + Pieces::kBytes - 1) / Pieces::kBytes * Pieces::kBytes;
    std::vector<uint8_t> given(whole, kUnwritten), expected(whole);
    for (int32_t i = 0; i < bytes; ++i) given[i] = expected[i] = static_cast<uint8_t>(i * 31 + i / 251);
    for (const auto kernel : {copy_through_pieces<false>, copy_through_pieces<true>}) {
      Array<uint8_t> in(given), out(whole);
      launch(kernel, 1, 32, 0, in.data(), bytes, out.data());
      expect_equal(out.host(), expected);
    }
  }
}

}  // namespace
}  // namespace mok::cuda::test

int main(int argc, char** argv) { return mok::cuda::test::run(argc, argv); }
