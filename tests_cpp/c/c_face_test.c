/* SPDX-License-Identifier: Apache-2.0 */
/* libcpattn as a program in C99 meets it: results are held to those stored in expected.h. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cpattn.h"
#include "expected.h"

static int failures = 0;

#define EXPECT(condition)                                              \
  do {                                                                 \
    if (!(condition)) {                                                \
      printf("%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);   \
      printf("  the last error: %s\n", cpattn_last_error());           \
      ++failures;                                                      \
    }                                                                  \
  } while (0)

#define EXPECT_OK(call) EXPECT((call) == CPATTN_OK)

#define EXPECT_REFUSED(call, message)                   \
  do {                                                  \
    EXPECT((call) == CPATTN_INVALID_ARGUMENT);          \
    EXPECT(strcmp(cpattn_last_error(), message) == 0);  \
  } while (0)

/* The rule of tests_py/support/c/cases.py. */
static void fill(float *values, int size, int seed) {
  int i;
  for (i = 0; i < size; ++i) {
    const int64_t number = ((int64_t)i * 7919 + (int64_t)seed * 104729) % 2001 - 1000;
    values[i] = (float)((double)number / 500.0);
  }
}

static double largest_error(const float *values, const double *exact, int size) {
  double largest = 0;
  int i;
  for (i = 0; i < size; ++i) {
    const double error = fabs(values[i] - exact[i]);
    if (!(error <= largest)) largest = error;
  }
  return largest;
}

static int have_the_same_bits(const void *a, const void *b, size_t size) {
  return memcmp(a, b, size) == 0;
}

/* The tensors of the cases: two sequences, 3 and 1 new tokens behind 2 and 8 cached ones. */
typedef struct Case {
  float q_data[4 * 4 * 8], k_data[6 * 4 * 2 * 8], v_data[6 * 4 * 2 * 8], sink_data[4], slope_data[4];
  float out_data[4 * 4 * 8], lse_data[4 * 4];
  cpattn_tensor q, k, v, sinks, slopes, out, lse, q_lens, kv_lens, tables;
  cpattn_batch batch;
  cpattn_layer layer;
} Case;

static void make_case(Case *c) {
  static const int32_t q_lens[] = {3, 1};
  static const int64_t kv_lens[] = {5, 9};
  static const int32_t tables[] = {5, 0, -1, 2, 4, 1};
  static const int64_t row_shape[] = {4, 4, 8}, lse_shape[] = {4, 4}, cache_shape[] = {6, 4, 2, 8};
  static const int64_t two[] = {2}, four[] = {4}, table_shape[] = {2, 3};
  fill(c->q_data, 4 * 4 * 8, 1);
  fill(c->k_data, 6 * 4 * 2 * 8, 2);
  fill(c->v_data, 6 * 4 * 2 * 8, 3);
  fill(c->sink_data, 4, 4);
  fill(c->slope_data, 4, 5);
  memset(c->out_data, 0, sizeof c->out_data);
  c->q = cpattn_tensor_of(c->q_data, CPATTN_FLOAT32, 3, row_shape);
  c->k = cpattn_tensor_of(c->k_data, CPATTN_FLOAT32, 4, cache_shape);
  c->v = cpattn_tensor_of(c->v_data, CPATTN_FLOAT32, 4, cache_shape);
  c->sinks = cpattn_tensor_of(c->sink_data, CPATTN_FLOAT32, 1, four);
  c->slopes = cpattn_tensor_of(c->slope_data, CPATTN_FLOAT32, 1, four);
  c->out = cpattn_tensor_of(c->out_data, CPATTN_FLOAT32, 3, row_shape);
  c->lse = cpattn_tensor_of(c->lse_data, CPATTN_FLOAT32, 2, lse_shape);
  c->q_lens = cpattn_tensor_of(q_lens, CPATTN_INT32, 1, two);
  c->kv_lens = cpattn_tensor_of(kv_lens, CPATTN_INT64, 1, two);
  c->tables = cpattn_tensor_of(tables, CPATTN_INT32, 2, table_shape);
  EXPECT_OK(cpattn_batch_init(&c->batch, sizeof c->batch));
  EXPECT_OK(cpattn_layer_init(&c->layer, sizeof c->layer));
  c->batch.q_lens = &c->q_lens;
  c->batch.kv_lens = &c->kv_lens;
  c->batch.block_tables = &c->tables;
  c->layer.q = &c->q;
  c->layer.k_cache = &c->k;
  c->layer.v_cache = &c->v;
  c->layer.out = &c->out;
  c->layer.lse = &c->lse;
}

static cpattn_plan *plan_of(Case *c) {
  cpattn_plan *plan = NULL;
  cpattn_attention_shape shape;
  EXPECT_OK(cpattn_attention_shape_init(&shape, sizeof shape));
  shape.num_pages = 6;
  shape.num_heads = 4;
  shape.num_kv_heads = 2;
  shape.head_dim = 8;
  c->batch.page_size = 4;
  EXPECT_OK(cpattn_plan_attention(&c->batch, &shape, &plan));
  c->batch.page_size = CPATTN_NONE;
  return plan;
}

static void test_results(void) {
  Case c;
  const double scale = 0.7;
  make_case(&c);
  EXPECT_OK(cpattn_paged_attention(&c.batch, &c.layer));
  EXPECT(largest_error(c.out_data, plain_out, 128) <= plain_error);
  EXPECT(largest_error(c.lse_data, plain_lse, 16) <= plain_lse_error);

  c.batch.window_left = 3;
  c.layer.scale = &scale;
  c.layer.softcap = 5;
  c.layer.sinks = &c.sinks;
  c.layer.alibi_slopes = &c.slopes;
  EXPECT_OK(cpattn_paged_attention(&c.batch, &c.layer));
  EXPECT(largest_error(c.out_data, options_out, 128) <= options_error);
  EXPECT(largest_error(c.lse_data, options_lse, 16) <= options_lse_error);
}

static void test_a_plan_and_pages_in_csr_form_give_the_same_bits(void) {
  static const int64_t three[] = {3}, five[] = {5}, two[] = {2};
  static const int32_t indptr[] = {0, 2, 5}, pages[] = {5, 0, 2, 4, 1}, last[] = {1, 1};
  const cpattn_tensor kv_indptr = cpattn_tensor_of(indptr, CPATTN_INT32, 1, three);
  const cpattn_tensor kv_indices = cpattn_tensor_of(pages, CPATTN_INT32, 1, five);
  const cpattn_tensor last_page_len = cpattn_tensor_of(last, CPATTN_INT32, 1, two);
  Case c;
  float first[128];
  cpattn_plan *plan;
  make_case(&c);
  EXPECT_OK(cpattn_paged_attention(&c.batch, &c.layer));
  memcpy(first, c.out_data, sizeof first);

  plan = plan_of(&c);
  memset(c.out_data, 0, sizeof first);
  EXPECT_OK(cpattn_run_attention(plan, &c.layer));
  EXPECT(have_the_same_bits(first, c.out_data, sizeof first));
  memset(c.out_data, 0, sizeof first);
  EXPECT_OK(cpattn_run_attention(plan, &c.layer));
  EXPECT(have_the_same_bits(first, c.out_data, sizeof first));
  cpattn_plan_destroy(plan);
  cpattn_plan_destroy(NULL);

  c.batch.kv_lens = NULL;
  c.batch.block_tables = NULL;
  c.batch.kv_indptr = &kv_indptr;
  c.batch.kv_indices = &kv_indices;
  c.batch.last_page_len = &last_page_len;
  memset(c.out_data, 0, sizeof first);
  EXPECT_OK(cpattn_paged_attention(&c.batch, &c.layer));
  EXPECT(have_the_same_bits(first, c.out_data, sizeof first));
}

/* Rows that were written to pages are read from there; a merge with keys that nobody sees is the
 * result itself. */
static void test_writes_and_merges(void) {
  static const int64_t slots_of[] = {20, 21, 22, 23, 0};
  static const int64_t five[] = {5}, rows_shape[] = {5, 2, 8}, slot_shape[] = {24, 2, 8};
  const cpattn_tensor slots = cpattn_tensor_of(slots_of, CPATTN_INT64, 1, five);
  cpattn_tensor k, v, no_keys, flat;
  cpattn_page_writes writes;
  const cpattn_tensor *outs[2], *lses[2];
  Case c;
  float k_data[80], v_data[80], first[128], minus_infinity[16];
  int i;
  make_case(&c);
  EXPECT_OK(cpattn_paged_attention(&c.batch, &c.layer));
  memcpy(first, c.out_data, sizeof first);
  memcpy(k_data, c.k_data + 20 * 16, 64 * sizeof(float));
  memcpy(k_data + 64, c.k_data, 16 * sizeof(float));
  memcpy(v_data, c.v_data + 20 * 16, 64 * sizeof(float));
  memcpy(v_data + 64, c.v_data, 16 * sizeof(float));
  memset(c.k_data + 20 * 16, 0, 64 * sizeof(float));
  memset(c.v_data, 0, 16 * sizeof(float));

  k = cpattn_tensor_of(k_data, CPATTN_FLOAT32, 3, rows_shape);
  v = cpattn_tensor_of(v_data, CPATTN_FLOAT32, 3, rows_shape);
  EXPECT_OK(cpattn_page_writes_init(&writes, sizeof writes));
  writes.slots = &slots;
  writes.k = &k;
  writes.k_pages = &c.k;
  writes.v = &v;
  writes.v_pages = &c.v;
  EXPECT_OK(cpattn_write_pages(&writes));
  EXPECT_OK(cpattn_paged_attention(&c.batch, &c.layer));
  EXPECT(have_the_same_bits(first, c.out_data, sizeof first));

  memset(c.k_data, 0, 16 * sizeof(float));
  flat = cpattn_tensor_of(c.k_data, CPATTN_FLOAT32, 3, slot_shape);
  EXPECT_OK(cpattn_write_slots(&slots, &k, &flat, 1));
  EXPECT(have_the_same_bits(c.k_data, k_data + 64, 16 * sizeof(float)));
  EXPECT_REFUSED(
      cpattn_write_slots(&slots, &k, &flat, -1),
      "write_slots: scale must be a positive number, got -1"
  );

  for (i = 0; i < 16; ++i) minus_infinity[i] = -HUGE_VALF;
  no_keys = c.lse;
  no_keys.data = minus_infinity;
  EXPECT_OK(cpattn_merge_state(&c.out, &c.lse, &c.q, &no_keys));
  EXPECT(largest_error(c.out_data, plain_out, 128) <= plain_error);
  outs[0] = &c.out;
  outs[1] = &c.q;
  lses[0] = &c.lse;
  lses[1] = &no_keys;
  EXPECT_OK(cpattn_merge_states(outs, lses, 2, NULL, &c.out, &c.lse));
  EXPECT(largest_error(c.lse_data, plain_lse, 16) <= plain_lse_error);
}

/* The example of Python's ContextParallelMetadata. */
static void test_context_parallel_metadata(void) {
  static const int32_t extend[] = {10}, seq[] = {15}, rows[] = {0, 1, 2, 8, 9}, split[] = {3, 3, 2, 2};
  static const int64_t one[] = {1};
  const cpattn_tensor extend_lens = cpattn_tensor_of(extend, CPATTN_INT32, 1, one);
  const cpattn_tensor seq_lens = cpattn_tensor_of(seq, CPATTN_INT32, 1, one);
  cpattn_cp_batch batch;
  cpattn_cp_metadata *metadata = NULL, *padded = NULL;
  const int32_t *values = NULL, *again = NULL;
  int64_t size = 0;
  EXPECT_OK(cpattn_cp_batch_init(&batch, sizeof batch));
  batch.extend_lens = &extend_lens;
  batch.seq_lens = &seq_lens;
  batch.cp_size = 2;
  EXPECT_OK(cpattn_build_cp_metadata(&batch, &metadata));
  EXPECT_OK(cpattn_cp_metadata_array(metadata, "local_q_indices", &values, &size));
  EXPECT(size == 5 && memcmp(values, rows, sizeof rows) == 0);
  EXPECT_OK(cpattn_cp_metadata_array(metadata, "local_q_indices", &again, &size));
  EXPECT(values == again);
  EXPECT_OK(cpattn_cp_metadata_array(metadata, "split_list", &values, &size));
  EXPECT(size == 4 && memcmp(values, split, sizeof split) == 0);
  EXPECT_OK(cpattn_cp_metadata_int(metadata, "total_seq_lens", &size));
  EXPECT(size == 10);
  EXPECT_REFUSED(
      cpattn_cp_metadata_int(metadata, "rows", &size),
      "cp_metadata_int: name must be that of a number, got 'rows'"
  );
  EXPECT_OK(cpattn_cp_metadata_pad_to_physical(metadata, &padded));
  EXPECT_OK(cpattn_cp_metadata_array(padded, "per_rank_actual_token", &values, &size));
  EXPECT(size == 2 && values[0] == 8 && values[1] == 8);
  cpattn_cp_metadata_destroy(padded);
  cpattn_cp_metadata_destroy(metadata);

  batch.strategy = "interleave";
  EXPECT_OK(cpattn_build_cp_metadata(&batch, &metadata));
  EXPECT_OK(cpattn_cp_metadata_array(metadata, "split_list", &values, &size));
  EXPECT(size == 0 && values == NULL);
  EXPECT_OK(cpattn_cp_metadata_int(metadata, "max_seqlen_q_combined", &size));
  EXPECT(size == CPATTN_NONE);
  cpattn_cp_metadata_destroy(metadata);
}

/* The examples of Python's topk_transform. */
static void test_topk_transform(void) {
  static const float scores[] = {5, 1, 7, 3};
  static const int32_t four_of[] = {4}, slots[] = {40, 41, 12, 13};
  static const int64_t row[] = {1, 4}, one[] = {1}, result[] = {1, 2};
  const cpattn_tensor logits = cpattn_tensor_of(scores, CPATTN_FLOAT32, 2, row);
  const cpattn_tensor lengths = cpattn_tensor_of(four_of, CPATTN_INT32, 1, one);
  const cpattn_tensor page_table = cpattn_tensor_of(slots, CPATTN_INT32, 2, row);
  int32_t out_data[2];
  const cpattn_tensor out = cpattn_tensor_of(out_data, CPATTN_INT32, 2, result);
  cpattn_topk_options options;
  EXPECT_OK(cpattn_topk_options_init(&options, sizeof options));
  options.logits = &logits;
  options.topk = 2;
  options.lengths = &lengths;
  options.out = &out;
  EXPECT_OK(cpattn_topk_transform(&options));
  EXPECT(out_data[0] == 2 && out_data[1] == 0);
  options.method = CPATTN_TOPK_PAGED;
  options.page_table = &page_table;
  EXPECT_OK(cpattn_topk_transform(&options));
  EXPECT(out_data[0] == 12 && out_data[1] == 40);
  options.method = CPATTN_TOPK_RAGGED;
  EXPECT_REFUSED(
      cpattn_topk_transform(&options),
      "topk_transform: topk_indices_offset must be given for CPATTN_TOPK_RAGGED"
  );
}

static void test_errors(void) {
  Case c;
  cpattn_tensor wrong;
  cpattn_batch no_struct;
  make_case(&c);
  EXPECT_REFUSED(cpattn_paged_attention(NULL, &c.layer), "paged_attention: batch must not be NULL");
  memset(&no_struct, 0, sizeof no_struct);
  EXPECT(cpattn_paged_attention(&no_struct, &c.layer) == CPATTN_INVALID_ARGUMENT);
  EXPECT(strstr(cpattn_last_error(), "batch must have a struct_size from ") != NULL);
  c.layer.q = NULL;
  EXPECT_REFUSED(
      cpattn_paged_attention(&c.batch, &c.layer), "paged_attention: q must be a tensor, got NULL"
  );
  wrong = c.q;
  c.layer.q = &wrong;
  wrong.device_type = 2;
  EXPECT_REFUSED(
      cpattn_paged_attention(&c.batch, &c.layer),
      "paged_attention: q must be on the CPU, got one on CUDA"
  );
  wrong = cpattn_tensor_of(NULL, CPATTN_FLOAT32, 3, c.q.shape);
  EXPECT_REFUSED(
      cpattn_paged_attention(&c.batch, &c.layer), "paged_attention: q has no storage, its data is NULL"
  );
  wrong = c.q;
  wrong.bits = 8;
  EXPECT_REFUSED(
      cpattn_paged_attention(&c.batch, &c.layer), "paged_attention: q has an unsupported dtype (float8)"
  );
  c.layer.q = &c.q;
  c.batch.num_threads = 0;
  EXPECT_REFUSED(
      cpattn_paged_attention(&c.batch, &c.layer), "paged_attention: num_threads must be >= 1, got 0"
  );
  c.batch.num_threads = 1;
  c.layer.kv_layout = "HDN";
  EXPECT_REFUSED(
      cpattn_paged_attention(&c.batch, &c.layer),
      "paged_attention: kv_layout must be 'NHD' or 'HND', got 'HDN'"
  );
  c.layer.kv_layout = "NHD";
  EXPECT_OK(cpattn_paged_attention(&c.batch, &c.layer)); /* the message is still that of before */
  EXPECT(strstr(cpattn_last_error(), "'HDN'") != NULL);
}

static void test_the_machine(void) {
  int32_t before = 0, now = 0;
  const char *isa = NULL;
  EXPECT(strcmp(cpattn_version(), CPATTN_VERSION) == 0);
  EXPECT_OK(cpattn_get_num_threads(&before));
  EXPECT_OK(cpattn_set_num_threads(before + 1));
  EXPECT_OK(cpattn_get_num_threads(&now));
  EXPECT(now == before + 1);
  EXPECT_REFUSED(cpattn_set_num_threads(0), "set_num_threads: num_threads must be >= 1, got 0");
  EXPECT_REFUSED(
      cpattn_set_num_threads(65537),
      "set_num_threads: num_threads must be at most 65536, got 65537"
  );
  EXPECT_OK(cpattn_active_isa(&isa));
  EXPECT(isa != NULL && strlen(isa) > 2);
}

int main(void) {
  EXPECT(strcmp(cpattn_last_error(), "") == 0);
  test_results();
  test_a_plan_and_pages_in_csr_form_give_the_same_bits();
  test_writes_and_merges();
  test_context_parallel_metadata();
  test_topk_transform();
  test_errors();
  test_the_machine();
  printf("%d failures\n", failures);
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
