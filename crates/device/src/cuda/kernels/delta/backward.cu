// The gradients of states, from the last chunk to the first, and what they are made of. With everything turned, and dS' the gradient of
// the state behind the chunk:
//
// dNᵀ = dOᵀ·P + ε·dS'ᵀ·K̂ᵀ; Xᵀ = dNᵀ·T; dSᵀ = γdS'ᵀ + α·dOᵀ·Q - αβ·Xᵀ·K̂; dV = βX

#define MOST_THREADS 256

// Multiplies a rounded left operand's tokens by their numbers, and rounds again.
__device__ __forceinline__ void scale_lefts(u32 (&lefts)[CHUNK / 16][4], const float *numbers) {
#pragma unroll
    for (int i = 0; i < CHUNK / 16; i++) {
#pragma unroll
        for (int part = 0; part < 4; part++) {
            float2 x = *(const float2 *)(numbers + token_of(2 * i + part / 2));
            lefts[i][part] = rounded_pair(first_of(lefts[i][part]) * x.x, second_of(lefts[i][part]) * x.y);
        }
    }
}

// With AHEAD, leaves only the gradient of the state before the stretch if there is none behind it.
template <bool AHEAD> __device__ __forceinline__ void go_back(const Parameters &p) {
    Way way;
    if (!find_way(p, way) || (AHEAD && way.stretch == 0)) return;
    int pitch = blockDim.x / 2 + 8;
    u16 *shelf = (u16 *)(memory + p.stages * tiles_bytes(true)) + warp_of() * 16 * PITCH;
    float dstate[WIDTH / 8][4];
    if (AHEAD)
        clear(dstate);
    else
        load_state(p, way, dstate);
    each_chunk(p, way, p.dout, true, true, [&](int number, const Tiles &tiles) {
        if (way.col >= way.columns) return;
        float dnews[TOKENS][4];
        clear(dnews);
        if (!AHEAD) keep_state(p, p.afters, way, number, dstate, shelf);
#pragma unroll
        for (int k = 0; k < WIDTH / 16; k++) {
            u32 left[4];
            as_left(left, dstate[2 * k], dstate[2 * k + 1]);
#pragma unroll
            for (int j = 0; j < CHUNK / 16; j++)
                add_product_turned(dnews[2 * j], dnews[2 * j + 1], left, tiles.keys, PITCH, j * 16, k * 16);
        }
        scale_tokens(dnews, tiles.numbers + WRITE * CHUNK);
        u32 dout[CHUNK / 16][4], left[CHUNK / 16][4];
#pragma unroll
        for (int i = 0; i < CHUNK / 16; i++) load_left_turned(dout[i], tiles.values, pitch, warp_of() * 16, i * 16);
        add_lower(dnews, dout, tiles.weights);
        as_lefts(left, dnews);
        float(&errors)[TOKENS][4] = dnews;
        clear(errors);
        add_lower(errors, left, tiles.inverse);

        if (!AHEAD) {
            as_lefts(left, errors);
            put_turned(left, tiles.values, pitch);
            keep_tokens(p, p.errors, way, number, tiles.values, pitch);
        }
        scale_tokens(errors, tiles.numbers + TAKE * CHUNK);
        if (!AHEAD) {
            as_lefts(left, errors);
            put_turned(left, tiles.values, pitch);
            store_tokens(p, p.dv, way, number, tiles.values, pitch);
        }

        float whole = tiles.numbers[SINCE * CHUNK + CHUNK - 1];
#pragma unroll
        for (int i = 0; i < WIDTH / 8; i++)
#pragma unroll
            for (int n = 0; n < 4; n++) dstate[i][n] *= whole;
        scale_lefts(dout, tiles.numbers + OUT * CHUNK);
        add_rows(dstate, dout, tiles.queries);
        scale_tokens(errors, tiles.numbers + READ * CHUNK);
#pragma unroll
        for (int i = 0; i < TOKENS; i++)
#pragma unroll
            for (int n = 0; n < 4; n++) errors[i][n] = -errors[i][n];
        as_lefts(left, errors);
        add_rows(dstate, left, tiles.keys);
    });
    if (AHEAD) leave_state(p, way, dstate);
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS) delta_go_back(const __grid_constant__ Parameters p) {
    go_back<false>(p);
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS) delta_ahead_back(const __grid_constant__ Parameters p) {
    go_back<true>(p);
}
