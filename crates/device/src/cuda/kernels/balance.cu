// The balance of experts: see kernel/balance.rs. A block has 64 tokens.

#define TOKENS 64

// partials[block, 0 or 1, expert]: the pairs of an expert, and the sum of its shares of the softmax.
extern "C" __global__ void __launch_bounds__(256) balance_tally(
    i64 tokens, int experts, int k, Matrix<float> logits, Matrix<u32> chosen, const u32 *counted, float *partials,
    u64 *defects) {
    extern __shared__ float own[];
    float *pairs = own, *shares = own + experts;
    for (int i = threadIdx.x; i < 2 * experts; i += blockDim.x) own[i] = 0.0f;
    i64 first = (i64)blockIdx.x * TOKENS, end = tokens - first < TOKENS ? tokens : first + TOKENS;
    for (i64 token = first; token < end; token++) {
        if (counted[token] == 0) continue;
        const float *row = logits.at(token, 0);
        float max = -INFINITY_F32, sum = 0.0f;
        for (int i = threadIdx.x; i < experts; i += blockDim.x) max = fmaxf(max, row[i]);
        // Its barriers also keep the additions of one token apart from those of the next.
        max = max_of_block(max);
        for (int i = threadIdx.x; i < experts; i += blockDim.x) sum += expf(row[i] - max);
        sum = sum_of_block(sum);
        for (int i = threadIdx.x; i < experts; i += blockDim.x) shares[i] += expf(row[i] - max) / sum;
        // A token chooses an expert once.
        for (int slot = threadIdx.x; slot < k; slot += blockDim.x) {
            u32 expert = *chosen.at(token, slot);
            if (expert >= experts)
                report(defects, DEFECT_COLUMN, expert, experts);
            else
                pairs[expert] += 1.0f;
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 2 * experts; i += blockDim.x) partials[(i64)blockIdx.x * 2 * experts + i] = own[i];
}

extern "C" __global__ void __launch_bounds__(256) balance_add_up(
    int blocks, int experts, const float *partials, Matrix<float> out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= 2 * experts) return;
    float sum = 0.0f;
    for (int block = 0; block < blocks; block++) sum += partials[(i64)block * 2 * experts + i];
    *out.at(i / experts, i % experts) = sum;
}

// A warp for each token at a time.
extern "C" __global__ void __launch_bounds__(256) balance_backward(
    i64 tokens, int experts, int layers, Matrix<float> logits, Matrix<float> tallies, const u32 *counted, float factor,
    Mixed dlogits) {
    extern __shared__ float slopes[];
    for (int i = threadIdx.x; i < experts; i += blockDim.x) {
        float pairs = 0.0f;
        for (int layer = 0; layer < layers; layer++) pairs += *tallies.at(2 * layer, i);
        slopes[i] = factor * pairs;
    }
    __syncthreads();
    int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    i64 first = (i64)blockIdx.x * TOKENS, end = tokens - first < TOKENS ? tokens : first + TOKENS;
    for (i64 token = first + threadIdx.x / 32; token < end; token += warps) {
        if (counted[token] == 0) continue;
        const float *row = logits.at(token, 0);
        float max = -INFINITY_F32, sum = 0.0f, mean = 0.0f;
        for (int i = lane; i < experts; i += 32) max = fmaxf(max, row[i]);
        max = max_of_warp(max);
        for (int i = lane; i < experts; i += 32) {
            float power = expf(row[i] - max);
            sum += power;
            mean = fmaf(power, slopes[i], mean);
        }
        sum = sum_of_warp(sum);
        mean = sum_of_warp(mean) / sum;
        for (int i = lane; i < experts; i += 32) {
            float v[1];
            load<1>(dlogits, token, i, 1, v);
            v[0] = fmaf(expf(row[i] - max) / sum, slopes[i] - mean, v[0]);
            store<1>(dlogits, token, i, 1, v);
        }
    }
}
