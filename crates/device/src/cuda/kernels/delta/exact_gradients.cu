// Gradients in f32, token by token: a block has a head of a segment, whose states lie in working memory. States before each chunk are
// kept; those between them are computed again, a chunk at a time.

#define THREADS 256
#define MOST_KEY 256
#define MOST_VALUE 1024

// Working memory of a block, in the words of `Parameters`: `befores` f32 [K, V] for each item, `afters` f32 [K, V] for S, for dS and for
// each of a chunk's tokens, `news` f32 [C, V] for each segment's value heads, and `errors` f32 [T, nv, K] twice, for dQ and dK̂.
struct Place {
    float *state, *dstate, *decayed, *missing;
    int size;
};

// One token's operands. Every thread calls it.
struct Token {
    float decay, take, g;
};

struct Rows {
    float query[MOST_KEY], key[MOST_KEY], dout[MOST_VALUE], derror[MOST_VALUE];
};

__device__ __forceinline__ float load_unit(const Parameters &p, const Heads &heads, i64 token, int head, float scale) {
    int col = threadIdx.x;
    float x = col < p.key ? head_at<float>(heads, token, head)[col] : 0.0f;
    return x * (scale / sqrtf(sum_of_block(x * x) + EPSILON));
}

__device__ __forceinline__ Token load_token(const Parameters &p, i64 token, int head, Rows &rows) {
    float query = load_unit(p, p.q, token, head / p.ratio, 1.0f / sqrtf((float)p.key));
    float key = load_unit(p, p.k, token, head / p.ratio, 1.0f);
    rows.query[threadIdx.x] = query;
    rows.key[threadIdx.x] = key;
    float rate = expf(number_of_head(p.log_rate, head)), bias = number_of_head(p.bias, head);
    Token t;
    t.g = -rate * softplus(*gate_at<float>(p.fade, token, head) + bias);
    t.decay = expf(t.g);
    t.take = exact_sigmoid(*gate_at<float>(p.take, token, head));
    __syncthreads();
    return t;
}

// One token forward: threads have columns. Leaves the decayed state, and what the value lacks of it.
__device__ __forceinline__ void advance(const Parameters &p, const Place &place, i64 token, int head, int number, Rows &rows) {
    Token t = load_token(p, token, head, rows);
    int stride = p.value;
    float *decayed = place.decayed + (i64)number * place.size;
    for (int v = threadIdx.x; v < p.value; v += THREADS) {
        float read = 0.0f;
        for (int k = 0; k < p.key; k++) {
            float s = place.state[k * stride + v] * t.decay;
            decayed[k * stride + v] = s;
            read = fmaf(rows.key[k], s, read);
        }
        float missing = head_at<float>(p.v, token, head)[v] - read, delta = t.take * missing;
        place.missing[number * stride + v] = missing;
        for (int k = 0; k < p.key; k++)
            place.state[k * stride + v] = fmaf(rows.key[k], delta, decayed[k * stride + v]);
    }
    // The rows are overwritten next.
    __syncthreads();
}

// One token backward; returns its shares of the gradients of log_rate and of the bias.
__device__ __forceinline__ float2 go_back(const Parameters &p, const Place &place, i64 token, int head, int number, Rows &rows) {
    Token t = load_token(p, token, head, rows);
    int stride = p.value;
    const float *before = place.decayed + (i64)number * place.size, *missing = place.missing + number * stride;
    float of_take = 0.0f;
    for (int v = threadIdx.x; v < p.value; v += THREADS) {
        float dout = head_at<float>(p.dout, token, head)[v], ddelta = 0.0f;
        for (int k = 0; k < p.key; k++) {
            float d = fmaf(rows.query[k], dout, place.dstate[k * stride + v]);
            place.dstate[k * stride + v] = d;
            ddelta = fmaf(rows.key[k], d, ddelta);
        }
        of_take = fmaf(ddelta, missing[v], of_take);
        rows.dout[v] = dout;
        rows.derror[v] = t.take * ddelta;
        head_at<float>(p.dv, token, head)[v] = t.take * ddelta;
    }
    of_take = sum_of_block(of_take);
    __syncthreads();
    float *dquery = (float *)p.errors + (token * p.heads + head) * p.key;
    float *dkey = dquery + (i64)p.tokens * p.heads * p.key;
    for (int k = threadIdx.x / 32; k < p.key; k += THREADS / 32) {
        float of_query = 0.0f, of_key = 0.0f;
        for (int col = threadIdx.x % 32; col < p.value; col += 32) {
            float s = before[k * stride + col], delta = t.take * missing[col];
            of_query = fmaf(fmaf(rows.key[k], delta, s), rows.dout[col], of_query);
            of_key += place.dstate[k * stride + col] * delta - s * rows.derror[col];
        }
        of_query = sum_of_warp(of_query);
        of_key = sum_of_warp(of_key);
        if (threadIdx.x % 32 == 0) {
            dquery[k] = of_query;
            dkey[k] = of_key;
        }
    }
    __syncthreads();
    float of_decay = 0.0f;
    for (int v = threadIdx.x; v < p.value; v += THREADS) {
        for (int k = 0; k < p.key; k++) {
            float d = fmaf(-rows.key[k], rows.derror[v], place.dstate[k * stride + v]);
            of_decay = fmaf(d, before[k * stride + v], of_decay);
            place.dstate[k * stride + v] = d * t.decay;
        }
    }
    of_decay = sum_of_block(of_decay);
    float rate = expf(number_of_head(p.log_rate, head)), bias = number_of_head(p.bias, head);
    float dfade = -of_decay * rate * exact_sigmoid(*gate_at<float>(p.fade, token, head) + bias);
    if (threadIdx.x == 0) {
        *gate_at<float>(p.dfade, token, head) = dfade;
        *gate_at<float>(p.dtake, token, head) = of_take * t.take * (1.0f - t.take);
    }
    __syncthreads();
    return make_float2(of_decay * t.g, dfade);
}

extern "C" __global__ void __launch_bounds__(THREADS) delta_exact_gradients(const __grid_constant__ Parameters p) {
    __shared__ Rows rows;
    int segment = blockIdx.x, head = blockIdx.y, start = p.offsets[segment], end = p.offsets[segment + 1];
    i64 block = (i64)(p.first_segment + segment) * p.heads + head;
    int chunks = (end - start + CHUNK - 1) / CHUNK;
    Place place;
    place.size = p.key * p.value;
    place.state = (float *)p.afters + block * (CHUNK + 2) * place.size;
    place.dstate = place.state + place.size;
    place.decayed = place.dstate + place.size;
    place.missing = (float *)p.news + block * CHUNK * p.value;
    auto kept = [&](int number) {
        return (float *)p.befores + ((first_slot(p, segment) + number) * p.heads + head) * place.size;
    };
    for (int i = threadIdx.x; i < place.size; i += THREADS) place.state[i] = place.dstate[i] = 0.0f;
    __syncthreads();
    for (int number = 0; number < chunks; number++) {
        for (int i = threadIdx.x; i < place.size; i += THREADS) kept(number)[i] = place.state[i];
        __syncthreads();
        for (int i = 0; i < CHUNK && start + number * CHUNK + i < end; i++)
            advance(p, place, start + number * CHUNK + i, head, i, rows);
    }
    double of_rate = 0.0, of_bias = 0.0;
    for (int number = chunks - 1; number >= 0; number--) {
        int first = start + number * CHUNK, count = min(CHUNK, end - first);
        for (int i = threadIdx.x; i < place.size; i += THREADS) place.state[i] = kept(number)[i];
        __syncthreads();
        for (int i = 0; i < count; i++) advance(p, place, first + i, head, i, rows);
        for (int i = count - 1; i >= 0; i--) {
            float2 shares = go_back(p, place, first + i, head, i, rows);
            of_rate += (double)shares.x;
            of_bias += (double)shares.y;
        }
    }
    if (threadIdx.x == 0) {
        ((double *)p.sums)[2 * block] = of_rate;
        ((double *)p.sums)[2 * block + 1] = of_bias;
    }
}

// Adds the value heads' gradients of queries and keys in order, and takes away what lies along the rows: a block for each token and key
// head.
extern "C" __global__ void __launch_bounds__(THREADS) delta_exact_units(const __grid_constant__ Parameters p) {
    i64 token = p.offsets[0] + blockIdx.x;
    int key_head = blockIdx.y, col = threadIdx.x;
    bool is_there = col < p.key;
    const float *sums = (const float *)p.errors;
    for (int which = 0; which < 2; which++) {
        const float *from = sums + (token * p.heads + key_head * p.ratio) * p.key + col;
        float gradient = 0.0f;
        for (int i = 0; i < p.ratio && is_there; i++) gradient += from[i * p.key];
        float x = is_there ? head_at<float>(which ? p.k : p.q, token, key_head)[col] : 0.0f;
        float squares = x * x, along = x * gradient;
        sums_of_block(squares, along);
        float factor = 1.0f / sqrtf(squares + EPSILON), scale = which ? 1.0f : 1.0f / sqrtf((float)p.key);
        float across = gradient - x * (factor * factor) * along;
        if (is_there) head_at<float>(which ? p.dk : p.dq, token, key_head)[col] = scale * factor * across;
        sums += (i64)p.tokens * p.heads * p.key;
    }
}
