// The tile interface of Hopper, wgmma.cuh and tile.cuh, on matrices that reveal their indices: one operand
// selects a single k for each row (or column) of the result, the other one encodes where each of its elements lies. So
// every element of the result says which element of which operand it came from; a descriptor, a swizzle or an order of
// registers that were wrong would show, and where.
#include <array>

#include "cuda/runtime/tensor_map.h"
#include "cuda/sm90/tile.cuh"
#include "cuda/test/harness.cuh"

namespace mok::cuda::test {
namespace {

using namespace sm90;
using bf16 = __nv_bfloat16;

constexpr int32_t kBoxWidth = kBoxColumns * 2;  // bytes
constexpr int32_t kRows = 2 * kWarpgroupRows, kMathThreads = 256, kThreads = 384;
constexpr int32_t kTiles = 3;  // a run of the ring of stages and of the staging areas; all alike
static_assert(kRows == kRowBlock && kTileColumns == 256);

// What a tile holds where: as wgmma.cuh documents it. `thread` is of both warpgroups.
struct Place {
  int32_t row, column;
};
Place place_of(int32_t thread, int32_t i) {
  const int32_t t = thread % 128;
  return {thread / 128 * kWarpgroupRows + 16 * (t / 32) + (t % 32) / 4 + (i % 4 >= 2 ? 8 : 0),
          8 * (i / 4) + 2 * (t % 4) + i % 2};
}

extern __shared__ __align__(1024) uint8_t memory[];

__device__ TileMemory& tile_memory() {
  TileMemory& m = *reinterpret_cast<TileMemory*>(memory);
  if (thread_index() == 0) {
    m.initialise();
    fence_mbarrier_init();
  }
  __syncthreads();
  return m;
}

// ---- The product.

struct Product {
  CUtensorMap left, right;
  int32_t steps;     // of each tile
  float* registers;  // [kTiles, kMathThreads, kAccumulators]
  bf16* pushed;      // [kTiles, kRows, kTileColumns]
};

// Boxes of one step for this layout: what the kernels load, in as few boxes as it takes.
template <Layout layout>
__device__ void load_step(const Product& p, TileMemory& m, int32_t step, Stages& stages) {
  uint8_t* stage = stages.acquire(m, kStageBytes);
  uint64_t* full = stages.full(m);
  const int32_t k = step * kStepDepth;
  if (layout == Layout::both_transposed) {
    for (int32_t i = 0; i < 2; ++i) tensor_load_2d(stage + i * kBoxBytes, &p.left, i * kBoxColumns, k, full);
  } else {
    tensor_load_2d(stage, &p.left, k, 0, full);
  }
  uint8_t* right = stage + kRight;
  if (layout == Layout::activations_weights_k) {
    tensor_load_2d(right, &p.right, k, 0, full);
  } else {
    for (int32_t i = 0; i < 4; ++i) tensor_load_2d(right + i * kBoxBytes, &p.right, i * kBoxColumns, k, full);
  }
  stages.advance();
}

// A tile is computed kTiles times. What accumulators held before is 1,000 each, which stays in the sum or must not.
template <Layout layout, bool kAccumulate>
__global__ void __launch_bounds__(kThreads, 1) multiply_tiles(const __grid_constant__ Product p) {
  TileMemory& m = tile_memory();
  const int32_t warp = thread_index() / 32;
  if (warp < kMathWarps) {
    take_registers<kMathRegisters>();
    Stages stages;
    Staging staging;
    for (int32_t tile = 0; tile < kTiles; ++tile) {
      Accumulators acc;
#pragma unroll
      for (float& v : acc) v = 1000.f;
      multiply<layout>(acc, kAccumulate, m, thread_index() / 128, p.steps, 0, stages, [] {});
      float* to = p.registers + (int64_t{tile} * kMathThreads + thread_index()) * kAccumulators;
#pragma unroll
      for (int32_t i = 0; i < kAccumulators; ++i) to[i] = acc[i];
      staging.acquire(m);
      const uint32_t address = Staging::row_address(m);
#pragma unroll
      for (int32_t i = 0; i < kAccumulators / 8; ++i) Staging::write_row(address, i, acc + 8 * i);
      staging.release(m);
    }
    return;
  }
  give_registers<kServiceRegisters>();
  if (warp == kMathWarps) {
    if (lane_index() != 0) return;
    Stages stages;
    for (int32_t i = 0; i < kTiles * p.steps; ++i) load_step<layout>(p, m, i % p.steps, stages);
  } else if (warp == kMathWarps + 1) {
    StoreSide side;
    for (int32_t tile = 0; tile < kTiles; ++tile) {
      for (int32_t warpgroup = 0; warpgroup < 2; ++warpgroup) {
        const uint8_t* staged = side.acquire(m, warpgroup);
        bf16* to = p.pushed + (tile * kRows + warpgroup * kWarpgroupRows) * kTileColumns;
        for (int32_t row = lane_index(); row < kWarpgroupRows; row += 32) {
          bulk_store(to + row * kTileColumns, staged + row * kStagingPitch, kTileColumns * 2);
        }
        side.release(m, warpgroup);
      }
      side.advance();
    }
    bulk_wait_all();
  }
}

// left [kRows, depth] and right [depth, kTileColumns], as functions of their indices.
using Element = std::function<float(int32_t, int32_t)>;

// Row-major [rows, columns], or its transpose.
std::vector<bf16> matrix(int32_t rows, int32_t columns, bool transposed, const Element& element) {
  std::vector<bf16> values(rows * columns);
  for (int32_t r = 0; r < rows; ++r) {
    for (int32_t c = 0; c < columns; ++c) values[transposed ? c * rows + r : r * columns + c] = bf16(element(r, c));
  }
  return values;
}

CUtensorMap encoded(CUtensorMapDataType type, const void* data, const std::vector<cuuint64_t>& dims, int32_t width,
                    int32_t rows) {
  CUtensorMap map;
  if (!encode(map, type, data, dims, width, rows)) throw Failed("the driver refused a tensor map");
  return map;
}

// Of an operand: with K contiguous, boxes as wide as a stage is deep; else 64 columns wide.
CUtensorMap operand(const Array<bf16>& array, bool k_contiguous, uint32_t depth, uint32_t others) {
  constexpr CUtensorMapDataType kType = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return k_contiguous ? encoded(kType, array.data(), {depth, others}, kStepDepth * 2, others)
                      : encoded(kType, array.data(), {others, depth}, kBoxWidth, kStepDepth);
}

template <Layout layout, bool kAccumulate>
void check_product(int32_t steps, const Element& left, const Element& right, const Element& product) {
  const uint32_t depth = steps * kStepDepth;
  constexpr bool kTransposed = layout == Layout::both_transposed, kWeightsK = layout == Layout::activations_weights_k;
  Array<bf16> a(matrix(kRows, depth, kTransposed, left)), b(matrix(depth, kTileColumns, kWeightsK, right));
  Array<float> registers(kTiles * kMathThreads * kAccumulators);
  Array<bf16> pushed(kTiles * kRows * kTileColumns);
  const Product p{operand(a, !kTransposed, depth, kRows), operand(b, kWeightsK, depth, kTileColumns), steps,
                  registers.data(), pushed.data()};
  launch(multiply_tiles<layout, kAccumulate>, 1, kThreads, sizeof(TileMemory), p);

  const float before = kAccumulate ? 1000.f : 0.f;
  std::vector<float> expected;
  std::vector<bf16> expected_pushed;
  for (int32_t tile = 0; tile < kTiles; ++tile) {
    for (int32_t thread = 0; thread < kMathThreads; ++thread) {
      for (int32_t i = 0; i < kAccumulators; ++i) {
        const Place at = place_of(thread, i);
        expected.push_back(before + product(at.row, at.column));
      }
    }
    for (int32_t i = 0; i < kRows * kTileColumns; ++i) {
      expected_pushed.push_back(bf16(before + product(i / kTileColumns, i % kTileColumns)));
    }
  }
  expect_equal(registers.host(), expected, [](size_t i) {
    const int32_t thread = i / kAccumulators % kMathThreads;
    const Place at = place_of(thread, i % kAccumulators);
    return "register " + std::to_string(i % kAccumulators) + " of thread " + std::to_string(thread) + ", row " +
           std::to_string(at.row) + ", column " + std::to_string(at.column);
  });
  expect_equal(pushed.host(), expected_pushed, [](size_t i) {
    return "pushed row " + std::to_string(i / kTileColumns % kRows) + ", column " + std::to_string(i % kTileColumns);
  });
}

// Codes of an element's place, each at most 256 and so exact in bf16; together they tell it.
struct Code {
  const char* what;
  int32_t (*of)(int32_t k, int32_t other);
};
constexpr std::array<Code, 3> kCodes{{
    {"row or column", [](int32_t, int32_t other) { return other + 1; }},
    {"k mod 256", [](int32_t k, int32_t) { return k % 256 + 1; }},
    {"k / 256", [](int32_t k, int32_t) { return k / 256 + 1; }},
}};

// Every code, and every k by some row and by some column. `depth` and 45 have no common divisor.
template <Layout layout>
void check_indices(int32_t steps) {
  const int32_t depth = steps * kStepDepth;
  for (const Code& code : kCodes) {
    try {
      for (int32_t first = 0; first < depth; first += kRows) {
        const auto pick = [&](int32_t row) { return ((first + row) * 45 + 7) % depth; };
        check_product<layout, false>(
            steps, [&](int32_t row, int32_t k) { return k == pick(row) ? 1.f : 0.f; },
            [&](int32_t k, int32_t column) { return static_cast<float>(code.of(k, column)); },
            [&](int32_t row, int32_t column) { return static_cast<float>(code.of(pick(row), column)); });
      }
      for (int32_t first = 0; first < depth; first += kTileColumns) {
        const auto pick = [&](int32_t column) { return ((first + column) * 45 + 7) % depth; };
        check_product<layout, false>(
            steps, [&](int32_t row, int32_t k) { return static_cast<float>(code.of(k, row)); },
            [&](int32_t k, int32_t column) { return k == pick(column) ? 1.f : 0.f; },
            [&](int32_t row, int32_t column) { return static_cast<float>(code.of(pick(column), row)); });
      }
    } catch (const Failed& failure) {
      throw Failed(std::string("codes of ") + code.what + ": " + failure.what());
    }
  }
}

constexpr int32_t kSteps = 448 / kStepDepth;
TEST(activations_weights) { check_indices<Layout::activations_weights>(kSteps); }
TEST(activations_weights_k) { check_indices<Layout::activations_weights_k>(kSteps); }
TEST(both_transposed) { check_indices<Layout::both_transposed>(kSteps); }

// Whole numbers, small enough for every sum to be exact, in products of 1 to 7 stages: more, as many, and fewer than
// the ring has; new sums and continued ones.
template <Layout layout>
void check_sums() {
  const auto left = [](int32_t row, int32_t k) { return static_cast<float>((row * 7 + k * 3) % 5 - 2); };
  const auto right = [](int32_t k, int32_t column) { return static_cast<float>((k * 5 + column * 11) % 7 - 3); };
  for (int32_t steps : {1, 2, kStages - 1, kStages, kStages + 1, 2 * kStages + 1}) {
    std::vector<float> sums(kRows * kTileColumns);
    for (int32_t i = 0; i < kRows * kTileColumns; ++i) {
      for (int32_t k = 0; k < steps * kStepDepth; ++k)
        sums[i] += left(i / kTileColumns, k) * right(k, i % kTileColumns);
    }
    const auto product = [&](int32_t row, int32_t column) { return sums[row * kTileColumns + column]; };
    check_product<layout, false>(steps, left, right, product);
    check_product<layout, true>(steps, left, right, product);
  }
}

TEST(sums) {
  check_sums<Layout::activations_weights>();
  check_sums<Layout::activations_weights_k>();
  check_sums<Layout::both_transposed>();
}

// ---- The staging area in boxes, as weight gradients leave it: rounded, or in f32 and half of the columns at a time.

constexpr int32_t kBoxes = 4;  // that a staging area holds

// A matrix that the tile overhangs on both sides.
constexpr int32_t kExperts = 2, kHeight = kRows - 24, kWidth = kTileColumns - 40;

// `codes` are the accumulators of all threads. One expert's matrix is written.
template <bool kF32>
__global__ void __launch_bounds__(kThreads, 1)
    stage_boxes(const __grid_constant__ CUtensorMap map, const float* codes, int32_t expert) {
  constexpr int32_t kPasses = kF32 ? 2 : 1, kColumns = kF32 ? kBoxColumns / 2 : kBoxColumns;
  TileMemory& m = tile_memory();
  const int32_t warp = thread_index() / 32;
  if (warp < kMathWarps) {
    Staging staging;
    for (int32_t pass = 0; pass < kPasses; ++pass) {
      const float* mine = codes + thread_index() * kAccumulators + pass * (kAccumulators / 2);
      staging.acquire(m);
      if (kF32) {
        const uint32_t address = Staging::f32_box_address(m);
        for (int32_t i = 0; i < kAccumulators / 2; i += 4) Staging::write_f32_box(address, i / 4, mine + i);
      } else {
        const uint32_t address = Staging::box_address(m);
        for (int32_t i = 0; i < kAccumulators / 8; ++i) Staging::write_box(address, i, mine + 8 * i);
      }
      staging.release(m);
    }
  } else if (warp == kMathWarps) {
    StoreSide side;
    for (int32_t pass = 0; pass < kPasses; ++pass) {
      for (int32_t warpgroup = 0; warpgroup < 2; ++warpgroup) {
        const uint8_t* staged = side.acquire(m, warpgroup);
        if (lane_index() < kBoxes) {
          const int32_t column = (pass * kBoxes + lane_index()) * kColumns;
          tensor_store_3d(&map, staged + lane_index() * kStagingBox, column, warpgroup * kWarpgroupRows, expert);
        }
        side.release(m, warpgroup);
      }
      side.advance();
    }
    bulk_wait_all();
  }
}

// code(row, column) of every accumulator must come to its row and column, of this expert's matrix alone.
template <class T>
void check_boxes(int32_t expert, const Element& code) {
  constexpr bool kF32 = sizeof(T) == 4;
  std::vector<float> codes;
  for (int32_t i = 0; i < kMathThreads * kAccumulators; ++i) {
    const Place at = place_of(i / kAccumulators, i % kAccumulators);
    codes.push_back(code(at.row, at.column));
  }
  Array<float> in(codes);
  Array<T> out(kExperts * kHeight * kWidth);
  const CUtensorMapDataType type = kF32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUtensorMap map = encoded(type, out.data(), {kWidth, kHeight, kExperts}, kBoxWidth, kWarpgroupRows);
  launch(stage_boxes<kF32>, 1, kThreads, sizeof(TileMemory), map, in.data(), expert);
  std::vector<T> expected(kExperts * kHeight * kWidth, unwritten<T>());
  for (int32_t i = 0; i < kHeight * kWidth; ++i) {
    expected[expert * kHeight * kWidth + i] = T(code(i / kWidth, i % kWidth));
  }
  expect_equal(out.host(), expected,
               [](size_t i) { return "row " + std::to_string(i / kWidth) + ", column " + std::to_string(i % kWidth); });
}

TEST(staging_bf16_boxes) {
  for (int32_t expert : {0, 1}) {
    check_boxes<bf16>(expert, [](int32_t row, int32_t) { return static_cast<float>(row); });
    check_boxes<bf16>(expert, [](int32_t, int32_t column) { return static_cast<float>(column); });
  }
}

// Row and column in one number, which has more digits than bf16 could hold.
TEST(staging_f32_boxes) {
  for (int32_t expert : {0, 1}) {
    check_boxes<float>(expert, [](int32_t row, int32_t column) { return static_cast<float>(row * 1000 + column); });
  }
}

// ---- Registers.

constexpr int32_t kLive = 190;  // values of a math thread at once: more than the 168 registers that it starts with
static_assert(kLive > 168 && kLive + 16 < kMathRegisters);

__global__ void __launch_bounds__(kThreads, 1) exchange_registers(const float* in, float* out) {
  const int32_t warp = thread_index() / 32;
  if (warp < kMathWarps) {
    take_registers<kMathRegisters>();
    float live[kLive];
#pragma unroll
    for (int32_t i = 0; i < kLive; ++i) live[i] = in[i * kMathThreads + thread_index()];
#pragma unroll
    for (float& v : live) asm volatile("" : "+f"(v)::"memory");  // all of them are in registers here
#pragma unroll
    for (int32_t i = 0; i < kLive; ++i) out[(kLive - 1 - i) * kMathThreads + thread_index()] = live[i];
  } else {
    give_registers<kServiceRegisters>();
  }
}

// Two warpgroups get what a third one gives up, or would wait for ever. That nothing spills is up to the compiler.
TEST(setmaxnreg) {
  std::vector<float> values, expected(kLive * kMathThreads);
  for (int32_t i = 0; i < kLive * kMathThreads; ++i) {
    values.push_back(static_cast<float>(i));
    expected[(kLive - 1 - i / kMathThreads) * kMathThreads + i % kMathThreads] = static_cast<float>(i);
  }
  Array<float> in(values), out(values.size());
  launch(exchange_registers, 4, kThreads, 0, in.data(), out.data());
  expect_equal(out.host(), expected);
}

}  // namespace
}  // namespace mok::cuda::test

int main(int argc, char** argv) { return mok::cuda::test::run(argc, argv); }
