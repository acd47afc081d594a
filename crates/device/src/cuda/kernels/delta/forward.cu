// The states, chunk after chunk, and what is read from them. With everything turned:
//
// R = β(Vᵀ - α·Sᵀ·K̂ᵀ); Nᵀ = R·Tᵀ; Oᵀ = α·Sᵀ·Qᵀ + Nᵀ·Pᵀ; Sᵀ = γSᵀ + ε·Nᵀ·K̂
//
// where K̂ and Q are rows of keys and queries times factors that are put elsewhere.

#define MOST_THREADS 256

// Evaluates `body(number of a state, its address)` for the lane's numbers of a state that lie in the head's memory.
template <class Body> __device__ __forceinline__ void each_number(const Parameters &p, const Way &way, Body body) {
#pragma unroll
    for (int i = 0; i < WIDTH / 8; i++) {
#pragma unroll
        for (int n = 0; n < 4; n++) {
            int row = i * 8 + lane_of() % 4 * 2 + n % 2, col = way.col + lane_of() / 4 + n / 2 * 8;
            if (row < p.key && col < p.value) body(i, n, state_at(p, way.segment, way.head, row, col));
        }
    }
}

// R [16, C], given Sᵀ·Kᵀ, from the warp's columns of the values.
__device__ __forceinline__ void subtract(float (&read)[TOKENS][4], const Tiles &tiles, int pitch) {
#pragma unroll
    for (int i = 0; i < CHUNK / 16; i++) {
        u32 values[4];
        load_left_turned(values, tiles.values, pitch, warp_of() * 16, i * 16);
#pragma unroll
        for (int part = 0; part < 2; part++) {
            float2 decay = *(const float2 *)(tiles.numbers + READ * CHUNK + token_of(2 * i + part));
            float2 take = *(const float2 *)(tiles.numbers + TAKE * CHUNK + token_of(2 * i + part));
            float(&r)[4] = read[2 * i + part];
            r[0] = take.x * (first_of(values[2 * part]) - decay.x * r[0]);
            r[1] = take.y * (second_of(values[2 * part]) - decay.y * r[1]);
            r[2] = take.x * (first_of(values[2 * part + 1]) - decay.x * r[2]);
            r[3] = take.y * (second_of(values[2 * part + 1]) - decay.y * r[3]);
        }
    }
}

// The rows of Sᵀ that end as Zᵀ and A of the border: no state, and behind V rows the unit matrix.
__device__ __forceinline__ void begin_ahead(const Parameters &p, const Way &way, float (&state)[WIDTH / 8][4]) {
#pragma unroll
    for (int i = 0; i < WIDTH / 8; i++) {
#pragma unroll
        for (int n = 0; n < 4; n++) {
            int row = way.col + lane_of() / 4 + n / 2 * 8, col = i * 8 + lane_of() % 4 * 2 + n % 2;
            state[i][n] = row - (int)p.padded_value == col ? 1.0f : 0.0f;
        }
    }
}

// What a way through the chunks leaves: the output; states and N for backward; or what the stretch does to states.
enum Purpose { OUTPUT, KEEP, AHEAD };

// The gradients of gates are differences in which N's rounding would show: one of log_rate was off by 3 %.
template <Purpose PURPOSE> __device__ __forceinline__ void go_through(const Parameters &p) {
    constexpr bool IS_WHOLE = PURPOSE == OUTPUT, KEEPS = PURPOSE == KEEP;
    Way way;
    if (!find_way(p, way)) return;
    bool is_last = way.stretch + 1 == way.stretches;
    if (PURPOSE == AHEAD) {
        if (is_last) return;
        // A is for states that are not zero.
        if (way.stretch > 0 || p.states) way.columns = border_rows(p);
    }
    if (way.block_col >= way.columns) return;
    int pitch = blockDim.x / 2 + 8;
    u16 *shelf = (u16 *)(memory + p.stages * tiles_bytes(IS_WHOLE)) + warp_of() * 16 * PITCH;
    float state[WIDTH / 8][4];
    if (PURPOSE == AHEAD)
        begin_ahead(p, way, state);
    else
        load_state(p, way, state);
    bool has_states = IS_WHOLE && p.states;
    if (has_states && way.stretches == 1)
        each_number(p, way, [&](int i, int n, float *from) { state[i][n] = *from; });
    each_chunk(p, way, p.v, IS_WHOLE, false, [&](int number, const Tiles &tiles) {
        if (way.col >= way.columns) return;
        float read[TOKENS][4], out[TOKENS][4];
        clear(read);
        clear(out);
        if (KEEPS) keep_state(p, p.befores, way, number, state, shelf);
#pragma unroll
        for (int k = 0; k < WIDTH / 16; k++) {
            u32 left[4];
            as_left(left, state[2 * k], state[2 * k + 1]);
#pragma unroll
            for (int j = 0; j < CHUNK / 16; j++) {
                add_product_turned(read[2 * j], read[2 * j + 1], left, tiles.keys, PITCH, j * 16, k * 16);
                if (IS_WHOLE) add_product_turned(out[2 * j], out[2 * j + 1], left, tiles.queries, PITCH, j * 16, k * 16);
            }
        }
        subtract(read, tiles, pitch);
        u32 left[CHUNK / 16][4], rest[CHUNK / 16][4];
        as_lefts(left, read);
        if (!IS_WHOLE) as_rests(rest, read, left);
        float(&news)[TOKENS][4] = read;
        clear(news);
        add_lower_turned(news, left, tiles.inverse);
        if (!IS_WHOLE) add_lower_turned(news, rest, tiles.inverse);
        as_lefts(left, news);
        if (KEEPS) {
            as_rests(rest, news, left);
            put_turned(left, tiles.values, pitch);
            keep_tokens(p, p.news, way, number, tiles.values, pitch);
            put_turned(rest, tiles.values, pitch);
            keep_tokens(p, p.rests, way, number, tiles.values, pitch);
        } else if (IS_WHOLE) {
            scale_tokens(out, tiles.numbers + OUT * CHUNK);
            add_lower_turned(out, left, tiles.weights);
            as_lefts(left, out);
            put_turned(left, tiles.values, pitch);
            store_tokens(p, p.out, way, number, tiles.values, pitch);
        }
        scale_tokens(news, tiles.numbers + WRITE * CHUNK);
        as_lefts(left, news);
        float whole = tiles.numbers[SINCE * CHUNK + CHUNK - 1];
#pragma unroll
        for (int i = 0; i < WIDTH / 8; i++)
#pragma unroll
            for (int n = 0; n < 4; n++) state[i][n] *= whole;
        add_rows(state, left, tiles.keys);
    });
    if (PURPOSE == AHEAD) leave_state(p, way, state);
    if (has_states && is_last) each_number(p, way, [&](int i, int n, float *to) { *to = state[i][n]; });
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS) delta_forward(const __grid_constant__ Parameters p) {
    go_through<OUTPUT>(p);
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS) delta_keep(const __grid_constant__ Parameters p) {
    go_through<KEEP>(p);
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS) delta_ahead(const __grid_constant__ Parameters p) {
    go_through<AHEAD>(p);
}
