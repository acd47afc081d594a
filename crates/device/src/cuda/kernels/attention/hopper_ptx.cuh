// Instructions that Hopper has of its own: products by a warpgroup, four warps whose tensor cores read tiles in shared
// memory (see hopper.cuh) by themselves. Of a [64, N] product a warp has sixteen rows, and a lane holds of them what
// bf16.cuh says.
//
// Products are issued and run on: their operands and sums are nobody else's until a wait.

// Copies to shared memory, or zeros: then nothing is read.
__device__ __forceinline__ void copy_chunk(u32 to, const void *from, bool is_there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(is_there ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void copy_number(u32 to, const void *from, bool is_there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(to), "l"(from), "r"(is_there ? 4 : 0)
                 : "memory");
}

__device__ __forceinline__ void load_matrices(u32 (&to)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
}

__device__ __forceinline__ void store_matrices(const u32 (&from)[4], u32 row) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(row), "r"(from[0]),
                 "r"(from[1]), "r"(from[2]), "r"(from[3])
                 : "memory");
}

// Adds to four numbers in device memory, and reads what was added.
__device__ __forceinline__ void add_four(float *to, const float (&x)[4]) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]),
                 "f"(x[3])
                 : "memory");
}

__device__ __forceinline__ void load_four(float (&to)[4], const float *from) {
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];\n"
                 : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
                 : "l"(from)
                 : "memory");
}

// Two numbers rounded to bf16, negative ones to zero.
__device__ __forceinline__ u32 rounded_positive_pair(float first, float second) {
    u32 pair;
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;\n" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

// Computed before what follows is waited for.
__device__ __forceinline__ void pin(u32 &x) {
    asm volatile("" : "+r"(x));
}

// What was written to shared memory before this is there for products issued after the next barrier.
__device__ __forceinline__ void show_to_products() {
    asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

// How products find a tile: its address, 1024 bytes from eight rows to the next, chunks exchanged over 128 bytes.
__device__ __forceinline__ u64 described(u32 tile) {
    return (u64)(tile >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

__device__ __forceinline__ void begin_products() {
    asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}

__device__ __forceinline__ void commit_products() {
    asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}

// Waits until at most so many of the last groups are under way.
template <int GROUPS> __device__ __forceinline__ void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(GROUPS) : "memory");
}

// Sums are not read before this, nor what follows computed from them.
template <int PARTS> __device__ __forceinline__ void settle(float (&sums)[PARTS][4]) {
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
#pragma unroll
        for (int n = 0; n < 4; n++) {
            asm volatile("" : "+f"(sums[i][n])::"memory");
        }
    }
}

#define PART(kind, i) kind(sums[i][0]), kind(sums[i][1]), kind(sums[i][2]), kind(sums[i][3])
#define PARTS_OF_32(kind) PART(kind, 0), PART(kind, 1), PART(kind, 2), PART(kind, 3)
#define PARTS_OF_64(kind) PARTS_OF_32(kind), PART(kind, 4), PART(kind, 5), PART(kind, 6), PART(kind, 7)
#define NAMES_OF_32 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"
#define NAMES_OF_64                                                                                                    \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                          \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"

// sums [64, 64] += left [64, 16] · right, whose rows are summands.
__device__ __forceinline__ void multiply_add(float (&sums)[8][4], const u32 (&left)[4], u64 right) {
    asm volatile("{\n.reg .pred adds;\nsetp.eq.b32 adds, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " NAMES_OF_64
                 ", {%32, %33, %34, %35}, %36, adds, 1, 1, 1;\n}\n"
                 : PARTS_OF_64("+f")
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right));
}

// sums [64, 64] = left · rightᵀ, or += with ADDS, where columns of both tiles are summands.
template <bool ADDS> __device__ __forceinline__ void multiply_columns(float (&sums)[8][4], u64 left, u64 right) {
#define MULTIPLY(kind)                                                                                                 \
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %34, 0;\n"                                                    \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " NAMES_OF_64                                   \
                 ", %32, %33, adds, 1, 1, 0, 0;\n}\n"                                                                  \
                 : PARTS_OF_64(kind)                                                                                   \
                 : "l"(left), "l"(right), "n"((int)ADDS))
    if constexpr (ADDS) {
        MULTIPLY("+f");
    } else {
        // What was there before need not be defined.
        MULTIPLY("=f");
    }
#undef MULTIPLY
}

// sums [64, 32] = leftᵀ · right, or += with ADDS, where rows of both tiles are summands.
template <bool ADDS> __device__ __forceinline__ void multiply_rows(float (&sums)[4][4], u64 left, u64 right) {
#define MULTIPLY(kind)                                                                                                 \
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %18, 0;\n"                                                    \
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 " NAMES_OF_32                                   \
                 ", %16, %17, adds, 1, 1, 1, 1;\n}\n"                                                                  \
                 : PARTS_OF_32(kind)                                                                                   \
                 : "l"(left), "l"(right), "n"((int)ADDS))
    if constexpr (ADDS) {
        MULTIPLY("+f");
    } else {
        MULTIPLY("=f");
    }
#undef MULTIPLY
}
