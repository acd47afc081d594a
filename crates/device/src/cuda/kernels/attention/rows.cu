// What attention does to rows by themselves.

// δ = Σ dout · out of each query, divided by what kept weights are multiplied by: a warp for each, or eight lanes where
// rows are aligned.
template <class T> __device__ __forceinline__ void delta(const Parameters &p) {
    bool is_aligned = sizeof(T) == 2 && p.aligned;
    u32 lanes = is_aligned ? 8 : LANES, lane = threadIdx.x % lanes;
    u32 token = blockIdx.x * (THREADS / lanes) + threadIdx.x / lanes, head = p.head_start + blockIdx.y;
    // All lanes of a warp add up.
    bool is_there = token < p.tokens;
    const T *out = (const T *)p.out.address + token * p.out.stride + head * p.out.step;
    const T *dout = (const T *)p.dout.address + token * p.dout.stride + head * p.dout.step;
    float sum = 0;
    if (is_there && is_aligned) {
        for (u32 i = lane * 8; i < p.dim; i += 64) {
            float x[8], y[8];
            load<8>(out + i, 8, x);
            load<8>(dout + i, 8, y);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                sum = fmaf(x[j], y[j], sum);
            }
        }
    } else if (is_there) {
        for (u32 i = lane; i < p.dim; i += LANES) {
            sum = fmaf(widen(out[i]), widen(dout[i]), sum);
        }
    }
    for (u32 distance = lanes / 2; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(0xffffffff, sum, distance);
    }
    if (is_there && lane == 0) {
        ((float *)p.delta)[(i64)blockIdx.y * p.tokens + token] = sum / p.kept;
    }
}

// Adds to the gradient of each head's sink: -Σ exp(sink - logsum) · Σ dout · out of its queries. A block for each head, in a
// fixed order.
extern "C" __global__ void __launch_bounds__(THREADS) attention_sinks(const __grid_constant__ Parameters p) {
    int head = blockIdx.x;
    float sink = sink_of(p, head), sum = 0;
    for (int token = threadIdx.x; token < (int)p.tokens; token += THREADS) {
        sum = fmaf(expf(sink - logsum_of(p, token, head)), delta_of(p, token, head), sum);
    }
    sum = sum_of_block(sum);
    if (threadIdx.x == 0) {
        ((float *)p.dsinks)[head] -= sum * p.kept;
    }
}

// Copies the new keys and values, which are `dk` and `dv` here, behind the older ones in the caches `k` and `v`. A block
// has a token of one key head; a token is found as a tile of one.
template <class T> __device__ __forceinline__ void append(const Parameters &p) {
    Tile tile;
    if (!find_tile(p, blockIdx.x, 1, tile)) {
        return;
    }
    i64 from = tile.first_query + tile.start, to = tile.first_key + tile.before + tile.start;
    u32 head = blockIdx.y;
    for (u32 i = threadIdx.x; i < p.dim; i += THREADS) {
        ((T *)p.k.address)[to * p.k.stride + head * p.k.step + i] =
            ((const T *)p.dk.address)[from * p.dk.stride + head * p.dk.step + i];
        ((T *)p.v.address)[to * p.v.stride + head * p.v.step + i] =
            ((const T *)p.dv.address)[from * p.dv.stride + head * p.dv.step + i];
    }
}

#define DEFINE(T)                                                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS) attention_delta_##T(const __grid_constant__ Parameters p) {  \
        delta<T>(p);                                                                                                   \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS) attention_append_##T(const __grid_constant__ Parameters p) { \
        append<T>(p);                                                                                                  \
    }

DEFINE(bf16)
DEFINE(float)
