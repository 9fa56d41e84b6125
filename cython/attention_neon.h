/* The primitives of NEON, which every ARMv8 has: four lanes, fused products. Neither fp16 arithmetic nor the dot
 * products of later versions are used: sums are in fp32. */

FD_INLINE vf ISA(splat)(float x) { return (vf)vdupq_n_f32(x); }
FD_INLINE vf ISA(fma)(vf a, vf b, vf c) { return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
/* b when either is not a number, unlike vmaxq and vmaxnmq */
FD_INLINE vf ISA(max)(vf a, vf b) {
    return (vf)vbslq_f32(vcgtq_f32((float32x4_t)a, (float32x4_t)b), (float32x4_t)a, (float32x4_t)b);
}
FD_INLINE vf ISA(min)(vf a, vf b) {
    return (vf)vbslq_f32(vcltq_f32((float32x4_t)a, (float32x4_t)b), (float32x4_t)a, (float32x4_t)b);
}
FD_INLINE v4f ISA(fold)(vf v) { return v; }
FD_INLINE vf ISA(load_fp16)(const uint16_t *p) { return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
FD_INLINE vf ISA(load_bf16)(const uint16_t *p) { return (vf)vshll_n_u16(vld1_u16(p), 16); }
FD_INLINE void ISA(round_fp16)(uint16_t *dst, vf v) {
    vst1_u16(dst, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v)));
}

/* The 4 bytes at p in every lane. */
FD_INLINE vi ISA(spread)(const char *p) {
    int32_t bits;
    memcpy(&bits, p, sizeof bits);
    return (vi)vdupq_n_s32(bits);
}

FD_INLINE vf ISA(load_int8)(const char *p) {
    uint32_t bits;
    memcpy(&bits, p, sizeof bits);
    const int16x8_t wide = vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(bits)));
    return (vf)vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
}

/* 16 integers from 8 bytes of an int4 row, in order: the low nibbles, then the high ones. */
FD_INLINE void ISA(nibbles)(const char *p, vf *x) {
    const uint8x8_t bytes = vld1_u8((const uint8_t *)p);
    const uint16x8_t low = vmovl_u8(vand_u8(bytes, vdup_n_u8(15))), high = vmovl_u8(vshr_n_u8(bytes, 4));
    x[0] = (vf)vcvtq_f32_u32(vmovl_u16(vget_low_u16(low)));
    x[1] = (vf)vcvtq_f32_u32(vmovl_u16(vget_high_u16(low)));
    x[2] = (vf)vcvtq_f32_u32(vmovl_u16(vget_low_u16(high)));
    x[3] = (vf)vcvtq_f32_u32(vmovl_u16(vget_high_u16(high)));
}

/* 8 bytes as 16-bit integers. */
FD_INLINE vi ISA(words)(const char *p) { return (vi)vmovl_s8(vld1_s8((const int8_t *)p)); }

/* The nibbles of 8 bytes as 16-bit integers: the low ones, then the high ones. */
FD_INLINE void ISA(nibble_words)(const char *p, vi *x) {
    const uint8x8_t bytes = vld1_u8((const uint8_t *)p);
    x[0] = (vi)vmovl_u8(vand_u8(bytes, vdup_n_u8(15)));
    x[1] = (vi)vmovl_u8(vshr_n_u8(bytes, 4));
}
