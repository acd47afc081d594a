// Matrices of 4-bit codes, expanded.

#define BLOCK 64
#define PER_WORD 8

// The numbers of kernel/nf4.rs.
__constant__ float CODES[16] = {
    -1.0f,         -0.6961928f,   -0.52507305f, -0.3949175f,  -0.28444138f, -0.18477343f, -0.091050036f, 0.0f,
    0.0795803f,    0.1609302f,    0.2461123f,   0.33791524f,  0.44070983f,  0.562617f,    0.72295684f,   1.0f};

// A vector lies in one word and in one block: its width divides both. Each code has a bank of shared memory of its own, so a warp
// looks up any 32 of them at once; from constant memory different ones would be read one after another.
#define EXPAND_NF4(T, NAME, N) \
    extern "C" __global__ void expand_nf4_##NAME##_##N( \
        i64 rows, i64 cols, Matrix<u32> codes, Matrix<float> absmax, Matrix<T> out) { \
        __shared__ float code[16]; \
        if (threadIdx.x < 16) code[threadIdx.x] = CODES[threadIdx.x]; \
        __syncthreads(); \
        each_vector<N>(rows, cols, [&](i64 row, i64 col, int count) { \
            u32 word = *codes.at(row, col / PER_WORD); \
            float factor = *absmax.at(row, col / BLOCK); \
            int first = (int)(col % PER_WORD); \
            float x[N]; \
            for (int i = 0; i < N; i++) { \
                /* Of each byte the upper half comes first. */ \
                int place = (first + i) ^ 1; \
                x[i] = code[(word >> (4 * place)) & 15] * factor; \
            } \
            store<N>(out.at(row, col), count, x); \
        }); \
    }
FOR_TYPES(EXPAND_NF4)
