// The instructions of tensor cores and asynchronous copies.

__device__ __forceinline__ u32 shared_address(const void *pointer) {
    return (u32)__cvta_generic_to_shared(pointer);
}

// Copies 16 bytes to shared memory, or zeros.
__device__ __forceinline__ void copy_async(void *to, const void *from, bool is_there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(to)), "l"(from),
                 "r"(is_there ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;\n" ::: "memory");
}

// Waits until at most so many of the last groups are under way.
template <int GROUPS>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(GROUPS) : "memory");
}

// Four 8 × 8 matrices of bf16, whose rows lie where the lanes say.
__device__ __forceinline__ void load_matrices(u32 (&to)[4], const u16 *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}

__device__ __forceinline__ void load_transposed(u32 (&to)[4], const u16 *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// sums [16, 8] += left [16, 16] · right [16, 8]
__device__ __forceinline__ void multiply_add(float (&sums)[4], const u32 (&left)[4], u32 right0, u32 right1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};\n"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
}

