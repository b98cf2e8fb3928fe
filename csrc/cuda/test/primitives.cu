// Every function of cuda/ptx.cuh, each by an assertion of its own: what arrives, where, and what is left alone.
#include <cmath>
#include <limits>

#include "cuda/ptx.cuh"
#include "cuda/runtime/tensor_map.h"
#include "cuda/test/harness.cuh"

namespace mok::cuda::test {
namespace {

using bf16 = __nv_bfloat16;

// ---- Which thread.

__global__ void write_indices(int32_t* threads, int32_t* lanes) {
  threads[threadIdx.x] = thread_index();
  lanes[threadIdx.x] = lane_index();
}

TEST(thread_and_lane_index) {
  constexpr int32_t kThreads = 384;
  Array<int32_t> threads(kThreads), lanes(kThreads);
  launch(write_indices, 1, kThreads, 0, threads.data(), lanes.data());
  std::vector<int32_t> expected_threads, expected_lanes;
  for (int32_t i = 0; i < kThreads; ++i) {
    expected_threads.push_back(i);
    expected_lanes.push_back(i % 32);
  }
  expect_equal(threads.host(), expected_threads);
  expect_equal(lanes.host(), expected_lanes);
}

// ---- mbarrier.

__global__ void go_through_phases(int32_t* seen) {
  __shared__ uint64_t bar;
  const auto look = [&] {
    *seen++ = mbarrier_test(&bar, 0);
    *seen++ = mbarrier_test(&bar, 1);
  };
  mbarrier_init(&bar, 3);
  fence_mbarrier_init();
  look();  // a new barrier: as if phase 1 had just been completed, so that a producer's first wait passes
  mbarrier_arrive(&bar);
  look();
  mbarrier_arrive(&bar, 2);
  look();
  mbarrier_wait(&bar, 0);
  mbarrier_arrive(&bar, 3);
  look();
  mbarrier_wait(&bar, 1);
}

TEST(mbarrier_phases) {
  Array<int32_t> seen(8);
  launch(go_through_phases, 1, 1, 0, seen.data());
  expect_equal(seen.host(), {0, 1, 0, 1, 1, 0, 0, 1});
}

__global__ void arrive_together(int32_t* sums, int32_t rounds) {
  __shared__ uint64_t full, empty;
  __shared__ int32_t box;
  const int32_t warp = thread_index() / 32;
  if (thread_index() == 0) {
    mbarrier_init(&full, 1);
    mbarrier_init(&empty, 3);
    fence_mbarrier_init();
  }
  __syncthreads();
  for (int32_t round = 0; round < rounds; ++round) {
    if (warp == 0) {
      if (lane_index() == 0) {
        mbarrier_wait(&empty, round % 2 ^ 1);
        box = round;
        mbarrier_arrive(&full);
      }
    } else {
      mbarrier_wait(&full, round % 2);
      if (lane_index() == 0) sums[warp - 1] += box;
      __syncwarp();
      if (lane_index() == 0) mbarrier_arrive(&empty);
    }
  }
}

// One warp hands numbers to three others through one word: each sees every number, and none sees one twice.
TEST(mbarrier_hands_over) {
  constexpr int32_t kRounds = 2000;
  Array<int32_t> sums(std::vector<int32_t>(3));
  launch(arrive_together, 1, 128, 0, sums.data(), kRounds);
  expect_equal(sums.host(), std::vector<int32_t>(3, kRounds * (kRounds - 1) / 2));
}

__global__ void expect_bytes(const uint8_t* in, int32_t* seen) {
  __shared__ alignas(128) uint8_t to[512];
  __shared__ uint64_t bar;
  mbarrier_init(&bar, 1);
  fence_mbarrier_init();
  for (uint32_t phase = 0; phase < 2; ++phase) {
    mbarrier_arrive_expect(&bar, 512);
    bulk_load(to, in, 256, &bar);
    for (int32_t i = 0; i < 100; ++i) __nanosleep(1000);
    *seen++ = mbarrier_test(&bar, phase);  // all have arrived, half of the bytes have come
    bulk_load(to + 256, in + 256, 256, &bar);
    mbarrier_wait(&bar, phase);
    *seen++ = mbarrier_test(&bar, phase);
  }
}

TEST(mbarrier_expects_bytes) {
  Array<uint8_t> in(512);
  Array<int32_t> seen(4);
  launch(expect_bytes, 1, 1, 0, in.data(), seen.data());
  expect_equal(seen.host(), {0, 1, 0, 1});
}

// ---- Bulk copies.

constexpr int32_t kLargest = 3584, kPitch = 4096;

__global__ void copy_in_bulk(const uint8_t* in, uint8_t* out) {
  __shared__ alignas(128) uint8_t through[kLargest];
  __shared__ uint64_t bar;
  const uint32_t bytes = (blockIdx.x + 1) * 16, at = blockIdx.x * kPitch + blockIdx.x % 8 * 16;
  mbarrier_init(&bar, 1);
  fence_mbarrier_init();
  mbarrier_arrive_expect(&bar, bytes);
  bulk_load(through, in + at, bytes, &bar);
  mbarrier_wait(&bar, 0);
  bulk_store(out + at, through, bytes);
  bulk_commit();
  bulk_wait_all();
}

// All sizes from 16 bytes on, at all alignments that there are; bytes around them stay.
TEST(bulk_load_and_store) {
  constexpr int32_t kSizes = kLargest / 16;
  std::vector<uint8_t> bytes(kSizes * kPitch), expected(bytes.size(), kUnwritten);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * 31 + i / 251);
  for (int32_t i = 0; i < kSizes; ++i) {
    const int32_t at = i * kPitch + i % 8 * 16;
    std::memcpy(&expected[at], &bytes[at], (i + 1) * 16);
  }
  Array<uint8_t> in(bytes), out(bytes.size());
  launch(copy_in_bulk, kSizes, 1, 0, in.data(), out.data());
  expect_equal(out.host(), expected, [](size_t i) {
    return "byte " + std::to_string(i % kPitch) + " of copy " + std::to_string(i / kPitch);
  });
}

constexpr int32_t kGroups = 64;

__global__ void reuse_after_read(uint32_t* out) {
  __shared__ alignas(128) uint32_t slots[2][kLargest / 4];
  for (int32_t group = 0; group < kGroups; ++group) {
    // At most the group before this one may still be read: its slot is the other one.
    if (thread_index() == 0) bulk_wait_read<1>();
    __syncwarp();
    for (int32_t i = thread_index(); i < kLargest / 4; i += 32) slots[group % 2][i] = group * 10000 + i;
    fence_proxy_async_shared();
    __syncwarp();
    if (thread_index() == 0) {
      bulk_store(out + group * (kLargest / 4), slots[group % 2], kLargest);
      bulk_commit();
    }
  }
  if (thread_index() == 0) bulk_wait_all();
}

// Generic writes to shared memory, stored in bulk while the next ones are written: fence, and wait for reads only.
TEST(bulk_wait_read) {
  constexpr int32_t kWords = kLargest / 4;
  Array<uint32_t> out(kGroups * kWords);
  launch(reuse_after_read, 1, 32, 0, out.data());
  std::vector<uint32_t> expected(kGroups * kWords);
  for (int32_t i = 0; i < kGroups * kWords; ++i) expected[i] = i / kWords * 10000 + i % kWords;
  expect_equal(out.host(), expected);
}

constexpr int32_t kHandOvers = 500, kWordsHandedOver = 64;

__global__ void hand_over(uint32_t* words, int32_t* sent, int32_t* received, uint32_t* mistakes) {
  __shared__ alignas(128) uint32_t here[kWordsHandedOver];
  __shared__ uint64_t bar;
  if (thread_index() == 0) {
    mbarrier_init(&bar, 1);
    fence_mbarrier_init();
  }
  __syncwarp();
  for (int32_t round = 0; round < kHandOvers; ++round) {
    if (blockIdx.x == 0) {
      if (thread_index() == 0) {
        while (load_acquire_gpu(received) < round) __nanosleep(20);
      }
      __syncwarp();
      for (int32_t i = thread_index(); i < kWordsHandedOver; i += 32) words[i] = round * 1000 + i;
      fence_proxy_async();
      __syncwarp();
      if (thread_index() == 0) add_release_gpu(sent, 1);
    } else {
      if (thread_index() == 0) {
        while (load_acquire_gpu(sent) <= round) __nanosleep(20);
        fence_proxy_async();
        mbarrier_arrive_expect(&bar, sizeof(here));
        bulk_load(here, words, sizeof(here), &bar);
        mbarrier_wait(&bar, round % 2);
      }
      __syncwarp();
      for (int32_t i = thread_index(); i < kWordsHandedOver; i += 32) {
        if (here[i] != static_cast<uint32_t>(round * 1000 + i)) atomicAdd(mistakes, 1u);
      }
      __syncwarp();
      if (thread_index() == 0) add_release_gpu(received, 1);
    }
  }
}

// From one CTA's generic writes to another's bulk loads and back, 500 times: fences of both proxies, release, acquire.
TEST(proxy_fence_and_gpu_scope) {
  Array<uint32_t> words(kWordsHandedOver), mistakes(std::vector<uint32_t>(1));
  Array<int32_t> counters(std::vector<int32_t>(64));
  launch(hand_over, 2, 32, 0, words.data(), counters.data(), counters.data() + 32, mistakes.data());
  expect_equal(mistakes.host(), {0u});
}

// ---- Tensor copies.

constexpr int32_t kColumns = 72, kRows = 100;  // neither is a multiple of a box

// Code of a 16-bit element, of which no two in an array of fewer than 2^15 are equal and none is unwritten.
bf16 code(size_t i) { return __ushort_as_bfloat16(static_cast<uint16_t>(i + 1)); }
std::vector<bf16> codes(size_t count) {
  std::vector<bf16> values;
  for (size_t i = 0; i < count; ++i) values.push_back(code(i));
  return values;
}

// A box's shape, and where the swizzle of its width puts an element: 16-byte pieces change places within a row.
struct BoxShape {
  int32_t width;  // in bytes
  int32_t rows;

  int32_t columns() const { return width / 2; }
  int32_t elements() const { return rows * columns(); }
  int32_t swizzled(int32_t row, int32_t column) const {
    const int32_t turn = width == 128 ? row % 8 : row / 2 % 4;
    return row * columns() + (column / 8 ^ turn) * 8 + column % 8;
  }
};

struct Box {
  int32_t x, y, z = 0;
};

CUtensorMap encoded(const Array<bf16>& array, const std::vector<cuuint64_t>& dims, BoxShape box, size_t of = 1) {
  CUtensorMap map;
  const bool good = encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, array.data(), dims, box.width, box.rows, of);
  if (!good) throw Failed("the driver refused a tensor map");
  return map;
}

// Boxes are aligned to what the swizzle repeats after. Nothing else is in shared memory, so that this holds.
extern __shared__ __align__(1024) uint8_t memory[];

// One CTA a box. The map has three dimensions if `deep`.
__global__ void load_boxes(const __grid_constant__ CUtensorMap map, bool deep, const Box* boxes, int32_t elements,
                           bf16* out) {
  const bf16* box = reinterpret_cast<const bf16*>(memory);
  if (thread_index() == 0) {
    uint64_t* bar = reinterpret_cast<uint64_t*>(memory + elements * 2);
    const Box at = boxes[blockIdx.x];
    mbarrier_init(bar, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect(bar, elements * 2);  // of the whole box, wherever it lies
    deep ? tensor_load_3d(memory, &map, at.x, at.y, at.z, bar) : tensor_load_2d(memory, &map, at.x, at.y, bar);
    mbarrier_wait(bar, 0);
  }
  __syncthreads();
  for (int32_t i = thread_index(); i < elements; i += blockDim.x) out[blockIdx.x * elements + i] = box[i];
}

// Loads boxes and compares them with at(box, row of the box, column of the box).
template <class At>
void check_loads(const CUtensorMap& map, bool deep, BoxShape shape, const std::vector<Box>& boxes, const At& at) {
  const int32_t elements = shape.elements();
  Array<bf16> out(boxes.size() * elements);
  Array<Box> where(boxes);
  launch(load_boxes, static_cast<uint32_t>(boxes.size()), 128, elements * 2 + 8, map, deep, where.data(), elements,
         out.data());
  std::vector<bf16> expected(boxes.size() * elements);
  for (size_t b = 0; b < boxes.size(); ++b) {
    for (int32_t i = 0; i < elements; ++i) {
      const int32_t row = i / shape.columns(), column = i % shape.columns();
      expected[b * elements + shape.swizzled(row, column)] = at(boxes[b], row, column);
    }
  }
  expect_equal(out.host(), expected, [&](size_t i) {
    return "box " + std::to_string(i / elements) + ", element " + std::to_string(i % elements);
  });
}

// [rows, columns]; beyond the edges zeros.
TEST(tensor_load_2d) {
  Array<bf16> in(codes(kRows * kColumns));
  for (const BoxShape shape : {BoxShape{128, 32}, {128, 64}, {64, 128}, {64, 256}}) {
    const std::vector<Box> boxes{{0, 0}, {32, 0}, {64, 0}, {0, 64}, {64, 64}, {8, 3}, {128, 0}, {0, 128}};
    check_loads(encoded(in, {kColumns, kRows}, shape), false, shape, boxes, [](Box b, int32_t row, int32_t column) {
      const int32_t r = b.y + row, c = b.x + column;
      return r < kRows && c < kColumns ? code(r * kColumns + c) : bf16(0.f);
    });
  }
}

// [experts, rows, columns]: rows beyond an expert's last are zeros, not the next expert's.
TEST(tensor_load_3d_weights) {
  constexpr int32_t kExperts = 3;
  Array<bf16> in(codes(kExperts * kRows * kColumns));
  for (const BoxShape shape : {BoxShape{128, 32}, {128, 64}, {64, 256}}) {
    const std::vector<Box> boxes{{0, 0, 0}, {64, 64, 0}, {0, 96, 1}, {64, 0, 2}, {0, 0, 3}};
    check_loads(encoded(in, {kColumns, kRows, kExperts}, shape), true, shape, boxes,
                [](Box b, int32_t row, int32_t column) {
                  const int32_t r = b.y + row, c = b.x + column;
                  const bool inside = r < kRows && c < kColumns && b.z < kExperts;
                  return inside ? code((b.z * kRows + r) * kColumns + c) : bf16(0.f);
                });
  }
}

// [rows, 2, columns], gate and up side by side: no box crosses from one into the other.
TEST(tensor_load_3d_pair) {
  Array<bf16> in(codes(kRows * 2 * kColumns));
  for (const BoxShape shape : {BoxShape{128, 32}, {128, 128}, {64, 128}}) {
    const std::vector<Box> boxes{{0, 0, 0}, {64, 0, 0}, {0, 1, 0}, {64, 1, 64}};
    check_loads(encoded(in, {kColumns, 2, kRows}, shape, 2), true, shape, boxes,
                [](Box b, int32_t row, int32_t column) {
                  const int32_t r = b.z + row, c = b.x + column;
                  return r < kRows && c < kColumns ? code((r * 2 + b.y) * kColumns + c) : bf16(0.f);
                });
  }
}

// One CTA a box, of which element i is 1 + its number + i.
__global__ void store_boxes(const __grid_constant__ CUtensorMap map, bool deep, const Box* boxes, int32_t elements) {
  uint16_t* box = reinterpret_cast<uint16_t*>(memory);
  for (int32_t i = thread_index(); i < elements; i += blockDim.x) {
    box[i] = static_cast<uint16_t>(1 + blockIdx.x * elements + i);
  }
  fence_proxy_async_shared();
  __syncthreads();
  if (thread_index() == 0) {
    const Box at = boxes[blockIdx.x];
    deep ? tensor_store_3d(&map, memory, at.x, at.y, at.z) : tensor_store_2d(&map, memory, at.x, at.y);
    bulk_commit();
    bulk_wait_all();
  }
}

// Stores boxes; index(box, row, column) says where in the array, or -1: clipped.
template <class Index>
void check_stores(const CUtensorMap& map, const Array<bf16>& out, bool deep, BoxShape shape,
                  const std::vector<Box>& boxes, const Index& index) {
  const int32_t elements = shape.elements();
  Array<Box> where(boxes);
  launch(store_boxes, static_cast<uint32_t>(boxes.size()), 128, elements * 2, map, deep, where.data(), elements);
  const std::vector<bf16> actual = out.host();
  std::vector<bf16> expected(actual.size(), unwritten<bf16>());
  for (size_t b = 0; b < boxes.size(); ++b) {
    for (int32_t i = 0; i < elements; ++i) {
      const int32_t row = i / shape.columns(), column = i % shape.columns(), to = index(boxes[b], row, column);
      if (to >= 0) expected[to] = code(b * elements + shape.swizzled(row, column));
    }
  }
  expect_equal(actual, expected);
}

TEST(tensor_store_2d) {
  for (const BoxShape shape : {BoxShape{128, 64}, {128, 128}, {64, 128}}) {
    Array<bf16> out((kRows + 28) * kColumns);  // what lies behind the matrix must stay
    check_stores(encoded(out, {kColumns, kRows}, shape), out, false, shape, {{0, 0}, {64, 0}, {0, 128}},
                 [](Box b, int32_t row, int32_t column) {
                   const int32_t r = b.y + row, c = b.x + column;
                   return r < kRows && c < kColumns ? r * kColumns + c : -1;
                 });
  }
}

// [experts, rows, columns]: what lies beyond an expert's last row does not get into the next one.
TEST(tensor_store_3d_weights) {
  constexpr int32_t kExperts = 3;
  const BoxShape shape{128, 64};
  Array<bf16> out(kExperts * kRows * kColumns);
  check_stores(encoded(out, {kColumns, kRows, kExperts}, shape), out, true, shape, {{0, 64, 0}, {64, 0, 1}},
               [](Box b, int32_t row, int32_t column) {
                 const int32_t r = b.y + row, c = b.x + column;
                 return r < kRows && c < kColumns ? (b.z * kRows + r) * kColumns + c : -1;
               });
}

TEST(tensor_store_3d_pair) {
  const std::vector<std::vector<Box>> sets{{{64, 0, 0}}, {{0, 1, 0}}, {{0, 0, 0}, {64, 1, 0}}};
  for (const BoxShape shape : {BoxShape{128, 128}, {64, 128}}) {
    for (const std::vector<Box>& boxes : sets) {
      Array<bf16> out((kRows + 28) * 2 * kColumns);
      check_stores(encoded(out, {kColumns, 2, kRows}, shape, 2), out, true, shape, boxes,
                   [](Box b, int32_t row, int32_t column) {
                     const int32_t r = b.z + row, c = b.x + column;
                     return r < kRows && c < kColumns ? (r * 2 + b.y) * kColumns + c : -1;
                   });
    }
  }
}

// ---- Scoped memory operations.

__global__ void use_scoped(int32_t* small, int64_t* large, int64_t* out) {
  out[0] = load_acquire_gpu(small);
  out[1] = load_relaxed_sys(small);
  out[2] = load_acquire_sys(large);
  store_release_sys(large + 1, -5);
  out[3] = load_acquire_sys(large + 1);
}

TEST(scoped_loads_and_stores) {
  constexpr int64_t kLarge = (int64_t{1} << 40) + 3;
  Array<int32_t> small(std::vector<int32_t>{-7});
  Array<int64_t> large(std::vector<int64_t>{kLarge, 0}), out(4);
  launch(use_scoped, 1, 1, 0, small.data(), large.data(), out.data());
  expect_equal(out.host(), {-7, -7, kLarge, -5});
}

__global__ void add_many(int32_t* small, int64_t* large) {
  add_release_gpu(small, 3);
  fence_sys();
  add_relaxed_sys(large, int64_t{1} << 30);
}

TEST(scoped_reductions) {
  constexpr int32_t kCtas = 100, kThreads = 256;
  Array<int32_t> small(std::vector<int32_t>{-1});
  Array<int64_t> large(std::vector<int64_t>{-1});
  launch(add_many, kCtas, kThreads, 0, small.data(), large.data());
  expect_equal(small.host(), {3 * kCtas * kThreads - 1});
  expect_equal(large.host(), {(int64_t{kCtas * kThreads} << 30) - 1});
}

__global__ void take_numbers(int32_t* counter, int32_t* taken) {
  atomicAdd(taken + add_acq_rel_gpu(counter, 2) / 2, 1);
}

// Every number once.
TEST(scoped_addition_that_returns) {
  constexpr int32_t kCtas = 100, kThreads = 256;
  Array<int32_t> counter(std::vector<int32_t>(1)), taken(std::vector<int32_t>(kCtas * kThreads));
  launch(take_numbers, kCtas, kThreads, 0, counter.data(), taken.data());
  expect_equal(taken.host(), std::vector<int32_t>(kCtas * kThreads, 1));
}

__global__ void ping_pong(int64_t* flags, uint4* word, int32_t rounds, int32_t* mistakes) {
  const int64_t me = blockIdx.x;
  for (int32_t round = 0; round < rounds; ++round) {
    if (me == round % 2) {
      *word = make_uint4(round, round + 1, round + 2, round + 3);
      store_release_sys(flags + 16 * (1 - me), round + 1);
    } else {
      while (load_acquire_sys(flags + 16 * me) != round + 1) __nanosleep(20);
      const uint4 seen = __ldcg(word);  // past L1
      if (seen.x != static_cast<uint32_t>(round) || seen.w != static_cast<uint32_t>(round + 3)) ++*mistakes;
    }
  }
}

// Two CTAs write one word in turn: what comes before a release is seen after the acquire, and never from a stale L1.
TEST(sys_scope) {
  Array<int64_t> flags(std::vector<int64_t>(32));
  Array<uint4> word(1);
  Array<int32_t> mistakes(std::vector<int32_t>(1));
  launch(ping_pong, 2, 1, 0, flags.data(), word.data(), 1000, mistakes.data());
  expect_equal(mistakes.host(), {0});
}

__global__ void measure_sleep(int64_t* out) {
  const uint64_t begin = nanoseconds();
  for (int32_t i = 0; i < 100; ++i) __nanosleep(100000);
  *out = static_cast<int64_t>(nanoseconds() - begin);
}

TEST(nanoseconds) {
  Array<int64_t> out(1);
  launch(measure_sleep, 1, 1, 0, out.data());
  // A sleep lasts at most twice what is asked for, and may be cut short; the unit is what matters.
  const int64_t slept = out.host()[0];
  if (slept < 100'000 || slept > 1'000'000'000) throw Failed(std::to_string(slept) + " ns for sleeps of 10 ms in all");
}

// ---- Vectors in shared memory.

__global__ void through_shared(const float4* in, float4* as_floats, uint4* as_bits) {
  __shared__ float4 there[32];
  const uint32_t address = shared_address(there) + lane_index() * 16;
  store_shared_f32(address, in[lane_index()]);
  as_floats[lane_index()] = load_shared_f32(address);
  as_bits[lane_index()] = load_shared(address);
}

TEST(shared_vectors) {
  std::vector<float4> values;
  for (int32_t lane = 0; lane < 32; ++lane) values.push_back(make_float4(lane, -lane, lane + 0.5f, lane * 1e30f));
  Array<float4> in(values), as_floats(32);
  Array<uint4> as_bits(32);
  launch(through_shared, 1, 32, 0, in.data(), as_floats.data(), as_bits.data());
  const auto bytes = [](const auto& v) {
    const auto* begin = reinterpret_cast<const int32_t*>(v.data());
    return std::vector<int32_t>(begin, begin + 4 * v.size());
  };
  expect_equal(bytes(as_floats.host()), bytes(values));
  expect_equal(bytes(as_bits.host()), bytes(values));
}

// ---- Matrices of 8x8.

constexpr int32_t kMatrices = 4, kMatrixElements = 64;

__global__ void store_four(const uint32_t* in, uint16_t* out) {
  __shared__ alignas(16) uint16_t matrices[kMatrices * kMatrixElements];
  const int32_t lane = lane_index();
  store_matrices(shared_address(matrices + lane * 8), in[lane], in[32 + lane], in[64 + lane], in[96 + lane]);
  __syncwarp();
  for (int32_t i = lane; i < kMatrices * kMatrixElements; i += 32) out[i] = matrices[i];
}

// Element (row, column) of a matrix is its number; what each lane has of them.
std::vector<uint16_t> matrices_of_numbers() {
  std::vector<uint16_t> elements;
  for (int32_t i = 0; i < kMatrices * kMatrixElements; ++i) elements.push_back(static_cast<uint16_t>(1000 + i));
  return elements;
}
std::vector<uint32_t> fragments_of_numbers() {
  std::vector<uint32_t> fragments;
  for (int32_t matrix = 0; matrix < kMatrices; ++matrix) {
    for (int32_t lane = 0; lane < 32; ++lane) {
      const uint32_t first = 1000 + matrix * kMatrixElements + lane / 4 * 8 + lane % 4 * 2;
      fragments.push_back(first | (first + 1) << 16);
    }
  }
  return fragments;
}

TEST(store_matrices) {
  Array<uint32_t> in(fragments_of_numbers());
  Array<uint16_t> out(kMatrices * kMatrixElements);
  launch(store_four, 1, 32, 0, in.data(), out.data());
  expect_equal(out.host(), matrices_of_numbers());
}

__global__ void pack_pairs(const float* in, uint32_t* out) {
  out[threadIdx.x] = pack_bf16(in[2 * threadIdx.x], in[2 * threadIdx.x + 1]);
}

TEST(pack_bf16) {
  // The first of a pair comes first in memory; ties go to even.
  const std::vector<float> values{
      1.f, 2.f, 1.f + 1.f / 256, 1.f + 3.f / 256, 1.f / 3, -0.f, std::numeric_limits<float>::infinity(), -3e38f};
  Array<float> in(values);
  Array<uint32_t> out(values.size() / 2);
  launch(pack_pairs, 1, static_cast<uint32_t>(values.size() / 2), 0, in.data(), out.data());
  expect_equal(out.host(), {0x40003f80u, 0x3f823f80u, 0x80003eabu, 0xff627f80u});
}

}  // namespace
}  // namespace mok::cuda::test

int main(int argc, char** argv) { return mok::cuda::test::run(argc, argv); }
