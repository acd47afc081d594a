// Copies by Hopper's copy engine, and the barriers in shared memory that count their bytes. See hopper_ptx.cuh for products.

// Where and how a matrix lies in device memory, as the driver encodes it.
struct alignas(128) TensorMap {
    u64 words[16];
};

__device__ __forceinline__ void init_barrier(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Barriers are there for the copy engine. The block's threads still have to meet.
__device__ __forceinline__ void show_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}

// Arrives, and makes the barrier wait for so many bytes of copies.
__device__ __forceinline__ void expect_bytes(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits for the end of a barrier's phase of this parity. A new barrier is in phase 0, behind one of parity 1.
__device__ __forceinline__ void wait_barrier(u32 barrier, u32 parity) {
    asm volatile("{\n.reg .pred ends;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 ends, [%0], %1;\n"
                 "@ends bra DONE;\nbra WAIT;\nDONE:\n}\n" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

// Copies a box of a tensor to shared memory; what is outside is zero, and is counted.
__device__ __forceinline__ void copy_box(u32 to, const TensorMap &from, int col, int row, int group, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];\n" ::"r"(to),
                 "l"(&from), "r"(col), "r"(row), "r"(group), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void prefetch_map(const TensorMap &map) {
    asm volatile("prefetch.tensormap [%0];\n" ::"l"(&map) : "memory");
}

// Copies a box from shared memory to a tensor, but for what is outside.
__device__ __forceinline__ void store_box(const TensorMap &to, u32 from, int col, int row, int group) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];\n" ::"l"(&to),
                 "r"(col), "r"(row), "r"(group), "r"(from)
                 : "memory");
}

// The same, adding to what is there.
__device__ __forceinline__ void add_box(const TensorMap &to, u32 from, int col, int row, int group) {
    asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2, %3}], [%4];\n" ::"l"(&to),
                 "r"(col), "r"(row), "r"(group), "r"(from)
                 : "memory");
}

__device__ __forceinline__ void commit_stores() {
    asm volatile("cp.async.bulk.commit_group;\n" ::: "memory");
}

// Waits until all but so many of this thread's last groups of stores have read shared memory.
template <int GROUPS> __device__ __forceinline__ void wait_stores() {
    asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(GROUPS) : "memory");
}

// Registers of each thread of this warpgroup.
template <int COUNT> __device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(COUNT));
}

template <int COUNT> __device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(COUNT));
}

// All 128 threads of a warpgroup meet. Barrier 0 is the block's.
__device__ __forceinline__ void meet_warpgroup(int barrier) {
    asm volatile("bar.sync %0, 128;\n" ::"r"(barrier) : "memory");
}
