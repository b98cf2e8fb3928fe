// Thin wrappers over the PTX that the kernels use: barriers, asynchronous copies, fences, scoped loads and reductions.
// One instruction a function; names follow the PTX ISA. What only one architecture has is in its own folder.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace mok::cuda {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Read anew at each use: kept, they would take a register for the whole kernel.
__device__ __forceinline__ int32_t thread_index() {
  int32_t i;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(i));
  return i;
}
__device__ __forceinline__ int32_t lane_index() {
  int32_t i;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(i));
  return i;
}

// ---- mbarrier: a phase completes when `count` arrivals and all expected bytes have come.

__device__ __forceinline__ void mbarrier_init(uint64_t* bar, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(count) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint64_t* bar, uint32_t count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(count) : "memory");
}
// Makes initialised barriers visible to the asynchronous proxy and to the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint64_t* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes)
               : "memory");
}
// Whether the phase before the current one has this parity: what mbarrier_wait waits for, without waiting.
__device__ __forceinline__ bool mbarrier_test(uint64_t* bar, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}"
      : "=r"(done)
      : "r"(shared_address(bar)), "r"(parity)
      : "memory");
  return done;
}
// Blocks until the phase of this parity has completed. Only for barriers that this CTA itself, or with it the other CTA
// of its pair, is certain to complete; waits on any others are bounded (see progress.cuh).
__device__ __forceinline__ void mbarrier_wait(uint64_t* bar, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(bar)),
      "r"(parity)
      : "memory");
}

// ---- Clusters: CTAs that reach each other's shared memory.

__device__ __forceinline__ int32_t cluster_rank() {
  int32_t i;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(i));
  return i;
}
// Where a CTA of the cluster has what this one has at `p`.
__device__ __forceinline__ uint32_t cluster_address(const void* p, int32_t cta) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(p)), "r"(cta));
  return address;
}
__device__ __forceinline__ void store_cluster(uint32_t address, int32_t v) {
  asm volatile("st.shared::cluster.s32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
__device__ __forceinline__ void store_cluster(uint32_t address, int64_t v) {
  asm volatile("st.shared::cluster.s64 [%0], %1;" ::"r"(address), "l"(v) : "memory");
}
// Until all threads of the cluster are here; orders their accesses.
__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// At a barrier of any CTA of the cluster. The second form also orders this thread's accesses for that CTA, and costs
// more.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t bar, uint32_t count = 1) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void mbarrier_release_cluster(uint32_t bar) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory");
}
// mbarrier_wait, and acquires what other CTAs of the cluster have released at the barrier.
__device__ __forceinline__ void mbarrier_acquire_cluster(uint64_t* bar, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(bar)),
      "r"(parity)
      : "memory");
}

// Waits for `threads` threads, whole warps, at one of the CTA's 16 barriers.
__device__ __forceinline__ void named_barrier(int32_t id, int32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- Asynchronous copies. Loads complete on an mbarrier, stores in groups of the issuing thread.

__device__ __forceinline__ void bulk_load(void* shared, const void* global, uint32_t bytes, uint64_t* bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(bar))
               : "memory");
}
__device__ __forceinline__ void bulk_store(void* global, const void* shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared_address(shared)),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void tensor_load_2d(void* shared, const CUtensorMap* map, int32_t x, int32_t y,
                                               uint64_t* bar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
          "r"(shared_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(shared_address(bar))
      : "memory");
}
__device__ __forceinline__ void tensor_load_3d(void* shared, const CUtensorMap* map, int32_t x, int32_t y, int32_t z,
                                               uint64_t* bar) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(shared_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(bar))
      : "memory");
}
// Into the same places of both CTAs of a cluster of two, and counted at the barriers of both.
__device__ __forceinline__ void tensor_load_both_2d(void* shared, const CUtensorMap* map, int32_t x, int32_t y,
                                                    uint64_t* bar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(shared_address(bar)), "h"(uint16_t{3})
      : "memory");
}
__device__ __forceinline__ void tensor_load_both_3d(void* shared, const CUtensorMap* map, int32_t x, int32_t y,
                                                    int32_t z, uint64_t* bar) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(bar)), "h"(uint16_t{3})
      : "memory");
}
__device__ __forceinline__ void tensor_store_2d(const CUtensorMap* map, const void* shared, int32_t x, int32_t y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
               "r"(shared_address(shared)), "r"(x), "r"(y)
               : "memory");
}
__device__ __forceinline__ void tensor_store_3d(const CUtensorMap* map, const void* shared, int32_t x, int32_t y,
                                                int32_t z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
               "r"(shared_address(shared)), "r"(x), "r"(y), "r"(z)
               : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until at most `pending` of the thread's latest groups have not yet read their shared memory.
template <int pending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}
// Until all of the thread's groups are complete: what they wrote may then be released to others.
__device__ __forceinline__ void bulk_wait_all() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// ---- Asynchronous copies of 16 bytes by each thread, past the L1 cache; of a source of 0 bytes come zeros, unread.

__device__ __forceinline__ void async_copy_16(uint32_t shared, const void* global, int32_t source_bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(source_bytes)
               : "memory");
}
__device__ __forceinline__ void async_copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most `pending` of the thread's latest groups have not arrived.
template <int pending>
__device__ __forceinline__ void async_copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// ---- Fences between the generic and the asynchronous proxy.

__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- Scoped memory operations: gpu scope for a rank's own counters, sys scope for what peers read or write.

__device__ __forceinline__ int32_t load_acquire_gpu(const int32_t* p) {
  int32_t v;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ int64_t load_acquire_sys(const int64_t* p) {
  int64_t v;
  asm volatile("ld.acquire.sys.global.s64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ int32_t load_relaxed_sys(const int32_t* p) {
  int32_t v;
  asm volatile("ld.relaxed.sys.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint64_t load_relaxed_sys(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_relaxed_sys(int32_t* p, int32_t v) {
  asm volatile("st.relaxed.sys.global.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void store_release_sys(int64_t* p, int64_t v) {
  asm volatile("st.release.sys.global.s64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ void add_release_gpu(int32_t* p, int32_t v) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
// Returns what was there before.
__device__ __forceinline__ int32_t add_acq_rel_gpu(int32_t* p, int32_t v) {
  int32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(p), "r"(v) : "memory");
  return before;
}
// Releases by what the thread adds, or stores, after it; one fence for several additions.
__device__ __forceinline__ void fence_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
__device__ __forceinline__ void add_relaxed_sys(int64_t* p, int64_t v) {
  asm volatile("red.relaxed.sys.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
// Adds to a counter of the device; returns what it held before.
__device__ __forceinline__ int64_t add(int64_t& counter, int64_t v) {
  return static_cast<int64_t>(
      atomicAdd(reinterpret_cast<unsigned long long*>(&counter), static_cast<unsigned long long>(v)));
}
__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ float4 load_shared_f32(uint32_t address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
__device__ __forceinline__ void store_shared_f32(uint32_t address, const float4& v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}

// Four 8x8 matrices of 16-bit elements: lane l names the row l % 8 of matrix l / 8; it gives elements 2 * (l % 4) and
// 2 * (l % 4) + 1 of row l / 4 of each.
__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

}  // namespace mok::cuda
