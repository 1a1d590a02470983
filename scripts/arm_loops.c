// SPDX-License-Identifier: Apache-2.0
// Innermost loops that the kernels do not have: scripts/arm_model.py says what they would take.
//
// Each does the work of one of the NEON kernels, by instructions of SVE2 or I8MM. Vectors of SVE
// are as long as the core has them: 256 bits on Neoverse V1, 128 on N2 and V2.
#include <arm_neon.h>
#include <arm_sve.h>

// 6 rows by 4 vectors of columns, one deep.
void sve_float32(const float* a, long lda, const float* panel, long depth, float* c) {
  const svbool_t all = svptrue_b32();
  svfloat32_t s00 = svdup_f32(0), s01 = s00, s02 = s00, s03 = s00, s10 = s00, s11 = s00, s12 = s00,
              s13 = s00, s20 = s00, s21 = s00, s22 = s00, s23 = s00, s30 = s00, s31 = s00,
              s32 = s00, s33 = s00, s40 = s00, s41 = s00, s42 = s00, s43 = s00, s50 = s00,
              s51 = s00, s52 = s00, s53 = s00;
#pragma GCC unroll 1
  for (long k = 0; k < depth; ++k, panel += 4 * svcntw()) {
    const svfloat32_t x0 = svld1_vnum_f32(all, panel, 0), x1 = svld1_vnum_f32(all, panel, 1),
                      x2 = svld1_vnum_f32(all, panel, 2), x3 = svld1_vnum_f32(all, panel, 3);
#define ROW(i)                                       \
  {                                                  \
    const svfloat32_t y = svdup_f32(a[i * lda + k]); \
    s##i##0 = svmla_f32_x(all, s##i##0, x0, y);      \
    s##i##1 = svmla_f32_x(all, s##i##1, x1, y);      \
    s##i##2 = svmla_f32_x(all, s##i##2, x2, y);      \
    s##i##3 = svmla_f32_x(all, s##i##3, x3, y);      \
  }
    ROW(0) ROW(1) ROW(2) ROW(3) ROW(4) ROW(5)
#undef ROW
  }
#define ROW(i)                                \
  svst1_vnum_f32(all, c, 4 * i, s##i##0);     \
  svst1_vnum_f32(all, c, 4 * i + 1, s##i##1); \
  svst1_vnum_f32(all, c, 4 * i + 2, s##i##2); \
  svst1_vnum_f32(all, c, 4 * i + 3, s##i##3);
  ROW(0) ROW(1) ROW(2) ROW(3) ROW(4) ROW(5)
#undef ROW
}

// 3 pairs of rows by 8 vectors of pairs of columns, four deep.
void sve_bfloat16(const bfloat16_t* a, long lda, const bfloat16_t* panel, long depth, float* c) {
  const svbool_t all = svptrue_b16();
  svfloat32_t s00 = svdup_f32(0), s01 = s00, s02 = s00, s03 = s00, s04 = s00, s05 = s00, s06 = s00,
              s07 = s00, s10 = s00, s11 = s00, s12 = s00, s13 = s00, s14 = s00, s15 = s00,
              s16 = s00, s17 = s00, s20 = s00, s21 = s00, s22 = s00, s23 = s00, s24 = s00,
              s25 = s00, s26 = s00, s27 = s00;
#pragma GCC unroll 1
  for (long k = 0; k < depth; k += 4, panel += 8 * svcnth()) {
    // Pairs of rows lie side by side, packed.
    const svbfloat16_t y0 = svld1rq_bf16(all, a + 2 * k), y1 = svld1rq_bf16(all, a + lda + 2 * k),
                       y2 = svld1rq_bf16(all, a + 2 * lda + 2 * k);
#define COLUMNS(j)                                         \
  {                                                        \
    const svbfloat16_t x = svld1_vnum_bf16(all, panel, j); \
    s0##j = svbfmmla_f32(s0##j, y0, x);                    \
    s1##j = svbfmmla_f32(s1##j, y1, x);                    \
    s2##j = svbfmmla_f32(s2##j, y2, x);                    \
  }
    COLUMNS(0) COLUMNS(1) COLUMNS(2) COLUMNS(3) COLUMNS(4) COLUMNS(5) COLUMNS(6) COLUMNS(7)
#undef COLUMNS
  }
#define COLUMNS(j)                                    \
  svst1_vnum_f32(svptrue_b32(), c, 3 * j, s0##j);     \
  svst1_vnum_f32(svptrue_b32(), c, 3 * j + 1, s1##j); \
  svst1_vnum_f32(svptrue_b32(), c, 3 * j + 2, s2##j);
  COLUMNS(0) COLUMNS(1) COLUMNS(2) COLUMNS(3) COLUMNS(4) COLUMNS(5) COLUMNS(6) COLUMNS(7)
#undef COLUMNS
}

// Weights of 4 rows times 4 vectors of int8 values, which loads widen.
void sve_int8_values(const signed char* v, long stride, const float* p, long keys, float* c) {
  const svbool_t all = svptrue_b32();
  svfloat32_t s00 = svdup_f32(0), s01 = s00, s02 = s00, s03 = s00, s10 = s00, s11 = s00, s12 = s00,
              s13 = s00, s20 = s00, s21 = s00, s22 = s00, s23 = s00, s30 = s00, s31 = s00,
              s32 = s00, s33 = s00;
#pragma GCC unroll 1
  for (long j = 0; j < keys; ++j, v += stride, p += 4) {
    const svfloat32_t y = svld1rq_f32(all, p);
#define COLUMNS(i)                                                           \
  {                                                                          \
    const svfloat32_t x = svcvt_f32_s32_x(all, svld1sb_vnum_s32(all, v, i)); \
    s0##i = svmla_lane_f32(s0##i, x, y, 0);                                  \
    s1##i = svmla_lane_f32(s1##i, x, y, 1);                                  \
    s2##i = svmla_lane_f32(s2##i, x, y, 2);                                  \
    s3##i = svmla_lane_f32(s3##i, x, y, 3);                                  \
  }
    COLUMNS(0) COLUMNS(1) COLUMNS(2) COLUMNS(3)
#undef COLUMNS
  }
#define COLUMNS(i)                          \
  svst1_vnum_f32(all, c, 4 * i, s0##i);     \
  svst1_vnum_f32(all, c, 4 * i + 1, s1##i); \
  svst1_vnum_f32(all, c, 4 * i + 2, s2##i); \
  svst1_vnum_f32(all, c, 4 * i + 3, s3##i);
  COLUMNS(0) COLUMNS(1) COLUMNS(2) COLUMNS(3)
#undef COLUMNS
}

// Weights of scores by FEXPA, which has 64 steps of a power of two: two vectors a round.
float sve_softmax(float* x, long n, float scale, float most) {
  const svbool_t all = svptrue_b32();
  const svfloat32_t shift = svdup_f32(0x1.803f8p17F);  // rounds to 1/64, biased as FEXPA wants
  svfloat32_t sum0 = svdup_f32(0), sum1 = sum0;
#pragma GCC unroll 1
  for (long i = 0; i < n; i += 2 * svcntw(), x += 2 * svcntw()) {
#define WEIGHTS(j)                                                                                \
  {                                                                                               \
    const svfloat32_t t = svnmsb_n_f32_x(all, svld1_vnum_f32(all, x, j), svdup_f32(scale), most); \
    const svfloat32_t y = svmax_n_f32_x(all, t, -100.0F);                                         \
    const svfloat32_t z = svadd_f32_x(all, y, shift);                                             \
    const svfloat32_t power = svexpa_f32(svreinterpret_u32_f32(z));                               \
    const svfloat32_t r = svsub_f32_x(all, y, svsub_f32_x(all, z, shift));                        \
    const svfloat32_t line = svmla_n_f32_x(all, svdup_f32(0.6931472F), r, 0.2402265F);            \
    const svfloat32_t w = svmla_f32_x(all, power, svmul_f32_x(all, power, r), line);              \
    sum##j = svadd_f32_x(all, sum##j, w);                                                         \
    svst1_vnum_f32(all, x, j, w);                                                                 \
  }
    WEIGHTS(0) WEIGHTS(1)
#undef WEIGHTS
  }
  return svaddv_f32(all, svadd_f32_x(all, sum0, sum1));
}

// Scores of int8: 4 heads by 16 keys, four deep.
void neon_sdot(const signed char* q, long dim, const signed char* panel, int* c) {
  int32x4_t sum[4][4] = {};
#pragma GCC unroll 1
  for (long d = 0; d < dim; d += 4, panel += 64) {
    int8x16_t x[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) x[j] = vld1q_s8(panel + 16 * j);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const int8x16_t y = vreinterpretq_s8_s32(vld1q_dup_s32((const int*)(q + i * dim + d)));
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) sum[i][j] = vdotq_s32(sum[i][j], x[j], y);
    }
  }
  for (int i = 0; i < 16; ++i) vst1q_s32(c + 4 * i, sum[i / 4][i % 4]);
}

// The same by pairs of heads and of keys, eight deep.
void neon_smmla(const signed char* q, long dim, const signed char* panel, int* c) {
  int32x4_t sum[2][8] = {};
#pragma GCC unroll 1
  for (long d = 0; d < dim; d += 8, panel += 128) {
    int8x16_t y[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) y[i] = vld1q_s8(q + 2 * i * dim + 2 * d);
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      const int8x16_t x = vld1q_s8(panel + 16 * j);
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) sum[i][j] = vmmlaq_s32(sum[i][j], y[i], x);
    }
  }
  for (int i = 0; i < 16; ++i) vst1q_s32(c + 4 * i, sum[i / 8][i % 8]);
}
