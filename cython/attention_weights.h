/* The V side of attention_integer.h, which includes it: weights as integers, and their sums over pairs of rows. */

/* Scales and minima of a step's rows, of int8, or of each of their groups, over tokens [from, to): the others are zero.
 * Scales are relative to the largest, `tops`, which is not-a-number when one of them is not finite. */
typedef struct {
    vf scales[FD_MAX_DIM / 32 * FD_BLOCK / VL], minima[FD_MAX_DIM / 32 * FD_BLOCK / VL];
    float tops[FD_MAX_DIM / 32];
    int from, to, groups;
} ISA(step_scales);

/* Weights of up to FD_MOST vectors for one step's tokens. */
typedef struct {
    vi *pairs;              /* [FD_MOST][groups][FD_BLOCK / WORDS]: lane i holds those of tokens i and i + VL */
    float *worth, *minima;  /* [FD_MOST][groups]: what one of the integers is worth; the weighted sum of the minima */
    int groups;             /* 1 for int8 */
} ISA(weights);

/* Lanes of vector i that hold tokens [from, to). */
FD_INLINE vi ISA(inside)(int i, int from, int to) {
    vi token;
    for (int j = 0; j < VL; j++) token[j] = i * VL + j;
    return (token >= from) & (token < to);
}

/* The largest of what is not negative; not-a-number when the sum says that one is not finite. */
FD_INLINE float ISA(top_of)(vf top, vf sum) {
    float lanes[VL];
    memcpy(lanes, &top, sizeof lanes);
    for (int i = VL / 2; i; i /= 2)
        for (int j = 0; j < i; j++) lanes[j] = lanes[j] > lanes[j + i] ? lanes[j] : lanes[j + i];
    return lanes[0] + 0.0f * ISA(sums)(sum, sum, sum, sum)[0];
}

FD_INLINE void ISA(prepare_scales)(const int dtype, const vi *headers, const int step, const int from, const int to,
                                   ISA(step_scales) *made) {
    made->from = from;
    made->to = to;
    for (int g = 0; g < made->groups; g++) {
        const vi *of_group = headers + g * (FD_BLOCK / VL);
        vf *scales = made->scales + g * (FD_BLOCK / VL), *minima = made->minima + g * (FD_BLOCK / VL);
        vf top = {0}, sum = {0};
        for (int i = 0; i * VL < step; i++) {
            vi header = of_group[i];
            if (i * VL < from || (i + 1) * VL > to) header &= ISA(inside)(i, from, to);
            const vf scale = (vf)(dtype == FD_INT4 ? header & (int32_t)0xffff0000 : header);
            scales[i] = scale;
            if (dtype == FD_INT4) minima[i] = (vf)(header << 16);
            top = ISA(max)(scale, top);
            sum += scale;
        }
        made->tops[g] = ISA(top_of)(top, sum);
        const vf inverse = ISA(splat)(made->tops[g] >= FD_QUANT_TINY ? 1.0f / made->tops[g] : 0.0f);
        for (int i = 0; i * VL < step; i++) scales[i] *= inverse;
    }
}

/* Weights w[t] of vector h for tokens [from, to) of a step, times the rows' or groups' scales, as integers for tokens
 * [first, last), multiples of WORDS. A product of the largest weight and the largest scale is -2^15, which 16 bits
 * hold, unlike 2^15, and which leaves what they are worth exact. Rounding to an integer by adding 1.5 * 2^23 leaves its low
 * half in a number's low bits. */
FD_INLINE void ISA(quantise_weights)(const int dtype, const float *w, const int first, const int last,
                                     const ISA(step_scales) *s, const int h, const ISA(weights) *made) {
    const vf magic = ISA(splat)(12582912.0f);
    vf relative[FD_BLOCK / VL], top = {0}, sum = {0};
    for (int i = s->from / VL; i * VL < s->to; i++) {
        const vf weight = ISA(load)(w + i * VL);
        top = ISA(max)(weight, top);
        sum += weight;
    }
    const float largest = ISA(top_of)(top, sum), worth = largest * (-1.0f / FD_WEIGHT_LIMIT);
    const vf inverse = ISA(splat)(largest >= FD_WEIGHT_TINY ? 1.0f / largest : 0.0f);
    for (int i = first / VL; i * VL < last; i++) {
        const int seen = (i + 1) * VL > s->from && i * VL < s->to;
        relative[i] = seen ? ISA(load)(w + i * VL) * inverse * -(float)FD_WEIGHT_LIMIT : ISA(splat)(0.0f);
    }
    for (int g = 0; g < s->groups; g++) {
        const vf *scales = s->scales + g * (FD_BLOCK / VL), *minima = s->minima + g * (FD_BLOCK / VL);
        vi *pairs = made->pairs + (h * s->groups + g) * (FD_BLOCK / ISA(WORDS));
        vf minimum = {0};
        for (int i = first / VL; i * VL < last; i += 2) {
            const vi a = (vi)ISA(fma)(relative[i], scales[i], magic);
            const vi b = (vi)ISA(fma)(relative[i + 1], scales[i + 1], magic);
            pairs[i / 2] = (a & 0xffff) | b << 16;
            if (dtype == FD_INT4) {
                minimum = ISA(fma)(relative[i], minima[i], minimum);
                minimum = ISA(fma)(relative[i + 1], minima[i + 1], minimum);
            }
        }
        const int none = s->tops[g] < FD_QUANT_TINY;
        made->worth[h * s->groups + g] = none ? 0.0f : worth * s->tops[g];
        if (dtype == FD_INT4)
            made->minima[h * s->groups + g] = worth * ISA(sums)(minimum, minimum, minimum, minimum)[0];
    }
}

/* Adds a step's tokens [from, to), multiples of WORDS, to NV vectors of H accumulators from dimension d on. */
FD_INLINE void ISA(add_pairs)(const int H, const int NV, const int lanes, const int dtype, const ISA(weights) *w,
                              const char *v, const size_t row, const int from, const int to, ISA(stream) *stream,
                              float *acc, const int dim, const int d) {
    enum { PAIRS = FD_BLOCK / ISA(WORDS) };
    ISA(stream) s = *stream;
    const int g = dtype == FD_INT4 ? d / 32 : 0, groups = w->groups;
    vi a[FD_MOST][8];
    FD_UNROLL
    for (int h = 0; h < H; h++)
        FD_UNROLL
        for (int j = 0; j < NV; j++) a[h][j] = (vi){0};
    v += dtype == FD_INT4 ? g * FD_INT4_GROUP_BYTES + 4 + d % 32 / 2 : FD_INT8_SCALE_BYTES + d;
    for (int t = from; t < to; t += ISA(WORDS)) {
        const char *weights = (const char *)(w->pairs + g * PAIRS + t / ISA(WORDS)), *va = v + t * row;
        for (int i = 0; i < VL; i++, va += row, weights += 4) {
            const char *vb = va + VL * row;
            ISA(advance)(&s);
            vi x[8 + ISA(BLOCK_VECTORS)];
            if (dtype == FD_INT4) {
                FD_UNROLL
                for (int j = 0; j < NV; j += ISA(BLOCK_VECTORS))
                    ISA(nibble_pairs)(va + j * VL / 2, vb + j * VL / 2, x + j);
            } else {
                FD_UNROLL
                for (int j = 0; j < NV; j += ISA(BLOCK_VECTORS))
                    if (NV * lanes < 16) ISA(eight_pairs)(va, vb, x);
                    else ISA(byte_pairs)(va + j * VL, vb + j * VL, x + j);
            }
            FD_UNROLL
            for (int h = 0; h < H; h++) {
                const vi weight = ISA(spread)(weights + (size_t)(h * groups) * PAIRS * sizeof(vi));
                FD_UNROLL
                for (int j = 0; j < NV; j++) a[h][j] = ISA(madd_to)(a[h][j], x[j], weight);
            }
        }
    }
    FD_UNROLL
    for (int h = 0; h < H; h++) {
        const vf worth = ISA(splat)(w->worth[h * groups + g]);
        const vf minimum = ISA(splat)(dtype == FD_INT4 ? w->minima[h * groups + g] : 0.0f);
        FD_UNROLL
        for (int j = 0; j < NV; j++) {
            float *to_add = acc + h * dim + d + j * VL;
            vf sum = ISA(load_lanes)(to_add, 0, FD_FP32, lanes);
            if (dtype == FD_INT4) sum += minimum;
            ISA(store_lanes)(to_add, ISA(fma)(__builtin_convertvector(a[h][j], vf), worth, sum), lanes);
        }
    }
    *stream = s;
}

typedef void (*ISA(add_integers_fn))(const ISA(weights) *w, const char *v, size_t row, int from, int to,
                                     ISA(stream) *stream, float *acc, int dim, int d);

#define FD_TILE(H, DTYPE)                                                                                           \
    static __attribute__((noinline)) void ISA(add_##H##_##DTYPE)(const ISA(weights) *w, const char *v, size_t row,  \
                                                                 int from, int to, ISA(stream) *stream, float *acc, \
                                                                 int dim, int d) {                                  \
        const int NV = ISA(integer_width)(H, FD_##DTYPE);                                                           \
        for (; d + NV * VL <= dim; d += NV * VL)                                                                    \
            ISA(add_pairs)(H, NV, VL, FD_##DTYPE, w, v, row, from, to, stream, acc, dim, d);                        \
        for (; NV * VL > 16 && d + 16 <= dim; d += 16)                                                              \
            ISA(add_pairs)(H, 16 / VL, VL, FD_##DTYPE, w, v, row, from, to, stream, acc, dim, d);                   \
        if (d < dim)                                                                                                \
            ISA(add_pairs)(H, VL < 8 ? 8 / VL : 1, VL < 8 ? VL : 8, FD_##DTYPE, w, v, row, from, to, stream, acc,   \
                           dim, d);                                                                                 \
    }
FD_EACH(FD_TILE, INT8)
FD_EACH(FD_TILE, INT4)
#undef FD_TILE
