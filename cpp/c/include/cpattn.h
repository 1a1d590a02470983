/* SPDX-License-Identifier: Apache-2.0 */
/* cpattn in C99: attention over paged KV caches on CPUs, its plans, writes into caches, merges,
 * context-parallel metadata, top-k selection and digests. docs/how_to/from_c.md has whole programs.
 *
 * Functions have the names, the options, the defaults and the errors of the Python functions, whose
 * documentation says more about each option.
 *
 * Every function that can fail returns a cpattn_status; cpattn_last_error() then has the message.
 * Arguments are checked first: after CPATTN_INVALID_ARGUMENT no result has been written, but for
 * cpattn_topk_transform, which finds pages that a table lacks while it writes. No pointer
 * to the caller's memory outlives a call. Functions may be called from several threads at once,
 * also with the same plan or metadata; a handle is destroyed by one thread, after its last use.
 * The only other state is the library's threads and the number that cpattn_set_num_threads() sets.
 *
 * Structs of options begin with their size and are filled with the defaults by their ..._init
 * function, so that a program runs with later libraries, whose structs may be longer. NULL,
 * and CPATTN_NONE for a number, mean "not given" like None in Python. Flags are 0 or 1. */
#ifndef CPATTN_H
#define CPATTN_H

#include <stddef.h>
#include <stdint.h>

/* NOLINTBEGIN(modernize-macro-to-enum): preprocessors ask for them. */
#define CPATTN_VERSION_MAJOR 0
#define CPATTN_VERSION_MINOR 1
#define CPATTN_VERSION_PATCH 0
/* NOLINTEND(modernize-macro-to-enum) */
#define CPATTN_VERSION "0.1.0"

#if defined(__GNUC__)
#define CPATTN_API __attribute__((visibility("default")))
#else
#define CPATTN_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum { CPATTN_NONE = -1 };

typedef enum cpattn_status {
  CPATTN_OK = 0,
  CPATTN_INVALID_ARGUMENT = 1, /* ValueError or TypeError in Python */
  CPATTN_OUT_OF_MEMORY = 2,    /* MemoryError */
  CPATTN_RUNTIME_ERROR = 3 /* RuntimeError: the system, or a process that was forked in a call */
} cpattn_status;

/* The version of the library, such as "0.1.0". */
CPATTN_API const char* cpattn_version(void);

/* The error of this thread's last call that failed; "" before any. It names function, argument,
 * rule and value, and is valid until the next call of this thread that fails. */
CPATTN_API const char* cpattn_last_error(void);

/* --- tensors --------------------------------------------------------------------------------- */

enum { CPATTN_CPU = 1 }; /* the only device_type that is taken */

/* Element types: code * 256 + bits of DLPack. */
enum {
  CPATTN_INT8 = 0x0008,
  CPATTN_INT32 = 0x0020,
  CPATTN_INT64 = 0x0040,
  CPATTN_UINT8 = 0x0108,
  CPATTN_FLOAT16 = 0x0210,
  CPATTN_FLOAT32 = 0x0220,
  CPATTN_FLOAT64 = 0x0240, /* only for scales */
  CPATTN_BFLOAT16 = 0x0410,
  CPATTN_BOOL = 0x0608,
  CPATTN_FLOAT8_E4M3FN = 0x0a08,
  CPATTN_FLOAT8_E5M2 = 0x0c08
};

/* A borrowed array. Its layout is that of DLTensor in dlpack.h, so that a DLTensor * may be cast.
 * There are at most 6 dimensions. Strides count elements and are not negative; the last dimension
 * of numbers is contiguous. */
typedef struct cpattn_tensor {
  void* data;
  int32_t device_type; /* DLTensor: device */
  int32_t device_id;
  int32_t ndim;
  uint8_t code; /* DLTensor: dtype */
  uint8_t bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides; /* NULL: contiguous */
  uint64_t byte_offset;
} cpattn_tensor;

/* A contiguous tensor on the CPU; `dtype` is one of the constants above. */
static inline cpattn_tensor cpattn_tensor_of(
    const void* data, int dtype, int32_t ndim, const int64_t* shape
) {
  cpattn_tensor tensor;
  tensor.data = (void*)data;
  tensor.device_type = CPATTN_CPU;
  tensor.device_id = 0;
  tensor.ndim = ndim;
  tensor.code = (uint8_t)(dtype >> 8);
  tensor.bits = (uint8_t)(dtype & 0xff);
  tensor.lanes = 1;
  tensor.shape = (int64_t*)shape;
  tensor.strides = NULL; /* NOLINT(modernize-use-nullptr): C has none */
  tensor.byte_offset = 0;
  return tensor;
}

/* --- attention over pages -------------------------------------------------------------------- */

/* A batch of sequences, their pages, and the keys that a token sees. Lengths, positions and page
 * ids are tensors of int32 or int64. */
typedef struct cpattn_batch {
  size_t struct_size;
  const cpattn_tensor* q_lens;          /* [batch]: new tokens of each sequence */
  const cpattn_tensor* kv_lens;         /* [batch]: cached tokens, the new ones included */
  const cpattn_tensor* first_positions; /* [batch]: of each first query; NULL: kv_lens - q_lens */
  const cpattn_tensor* block_tables;    /* [batch, >= ceil(max(kv_lens) / page_size)]: page ids */
  const cpattn_tensor* kv_indptr;       /* [batch + 1]: pages in CSR form, instead of kv_lens */
  const cpattn_tensor* kv_indices;      /* [pages of all]         and block_tables */
  const cpattn_tensor* last_page_len;   /* [batch]: tokens on the last page of each sequence */
  int64_t page_size;                    /* a plan and caches of three dimensions need it */
  const cpattn_tensor* causal_of_each;  /* bool [batch], instead of `causal` */
  int64_t window_left;                  /* keys before a token's own that it sees; NONE: all */
  int64_t window_right;                 /* keys after it */
  const cpattn_tensor* custom_mask;     /* bool [sum(q_lens * kv_lens)]: 1 is visible */
  const cpattn_tensor* packed_custom_mask; /* uint8 [sum(ceil(q_lens * kv_lens / 8))]: as bits */
  int32_t causal;                          /* 1: a token sees keys up to its own position */
  int32_t allow_short_kv;                  /* 0: under causal, kv_lens are at least q_lens */
  int32_t batch_invariant;                 /* 0: bits of a row may depend on the batch's lengths */
  int32_t num_threads;                     /* NONE: cpattn_get_num_threads() */
  int32_t precise;                         /* 1: in bfloat16 only the result is rounded */
} cpattn_batch;

/* The facts that a plan needs about the layers that it runs for. */
typedef struct cpattn_attention_shape {
  size_t struct_size;
  int64_t num_pages;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;   /* with that of q_rope, if given */
  int32_t v_head_dim; /* NONE: head_dim */
} cpattn_attention_shape;

/* The tensors of a layer. Caches are [num_pages, page_size, num_kv_heads, dim] ("NHD"), [num_pages,
 * num_kv_heads, page_size, dim] ("HND") or, with page_size, [num_slots, num_kv_heads, dim]. */
typedef struct cpattn_layer {
  size_t struct_size;
  const cpattn_tensor* q;       /* [num_tokens, num_heads, head_dim]: float32, float16, bfloat16 */
  const cpattn_tensor* k_cache; /* of the dtype of q, or both of codes: float8_e4m3fn, */
  const cpattn_tensor* v_cache; /*   float8_e5m2, int8, or uint8 with kv_dtype */
  const cpattn_tensor* q_rope;  /* [num_tokens, num_heads, rope_dim]: the last dimensions of q, */
  const cpattn_tensor* k_rope;  /*   and a cache of those of the keys, stored apart */
  const char* kv_layout;        /* "NHD" or "HND" */
  const char* kv_dtype;         /* of caches of uint8: "float8_e4m3fn", "float8_e5m2" or "int8" */
  const cpattn_tensor*
      k_scale; /* a number (ndim 0), float32 [num_kv_heads], or one for each token */
  const cpattn_tensor* v_scale; /*   and head; NULL: 1. int8 needs both */
  const double* scale;          /* NULL: 1 / sqrt(head_dim); must be given for head_dim > 256 */
  double softcap;               /* 0: none */
  const cpattn_tensor* bias;    /* [batch, num_heads, max(q_lens), max(kv_lens)], or, instead, */
  const cpattn_tensor* const* bias_of_each; /* [num_heads, q_len, kv_len] of each sequence */
  int64_t num_bias_of_each;                 /* the length of that array */
  const cpattn_tensor* alibi_slopes;        /* float32 [num_heads] or [batch, num_heads] */
  const cpattn_tensor* relative_bias;       /* float32 [num_heads, 2 * m + 1] */
  const cpattn_tensor* sinks;               /* float32 [num_heads] */
  const cpattn_tensor* out;                 /* [num_tokens, num_heads, v_head_dim], dtype of q */
  const cpattn_tensor* lse;                 /* float32 [num_tokens, num_heads], or NULL */
} cpattn_layer;

/* Fill a struct with the defaults; `struct_size` is its sizeof. */
CPATTN_API cpattn_status cpattn_batch_init(cpattn_batch* batch, size_t struct_size);
CPATTN_API cpattn_status
cpattn_attention_shape_init(cpattn_attention_shape* shape, size_t struct_size);
CPATTN_API cpattn_status cpattn_layer_init(cpattn_layer* layer, size_t struct_size);

/* Attention of ragged queries over keys and values in pages. */
CPATTN_API cpattn_status
cpattn_paged_attention(const cpattn_batch* batch, const cpattn_layer* layer);

/* The division of a batch into work items, made once for all layers. */
typedef struct cpattn_plan cpattn_plan;

CPATTN_API cpattn_status cpattn_plan_attention(
    const cpattn_batch* batch, const cpattn_attention_shape* shape, cpattn_plan** plan
);
CPATTN_API cpattn_status cpattn_run_attention(const cpattn_plan* plan, const cpattn_layer* layer);
CPATTN_API void cpattn_plan_destroy(cpattn_plan* plan); /* NULL is nothing */

/* --- merges of results over disjoint keys ---------------------------------------------------- */

/* Merges the second result into the first: [num_tokens, num_heads, head_dim] and, float32,
 * [num_tokens, num_heads]. */
CPATTN_API cpattn_status cpattn_merge_state(
    const cpattn_tensor* out_a,
    const cpattn_tensor* lse_a,
    const cpattn_tensor* out_b,
    const cpattn_tensor* lse_b
);
/* Merges any number of results. `sinks` may be NULL; `out` and `lse` may be the first part. */
CPATTN_API cpattn_status cpattn_merge_states(
    const cpattn_tensor* const* outs,
    const cpattn_tensor* const* lses,
    int64_t num_parts,
    const cpattn_tensor* sinks,
    const cpattn_tensor* out,
    const cpattn_tensor* lse
);

/* --- writes into caches ---------------------------------------------------------------------- */

/* Keys and values of tokens to write into caches, which may have any dtype of caches. */
typedef struct cpattn_page_writes {
  size_t struct_size;
  const cpattn_tensor* slots;   /* ints [num_tokens]: page * page_size + offset; -1 skips a token */
  const cpattn_tensor* k;       /* [num_tokens, num_kv_heads, dim] */
  const cpattn_tensor* k_pages; /* a cache, as of cpattn_layer */
  const cpattn_tensor* v;
  const cpattn_tensor* v_pages;
  const char* kv_layout; /* "NHD" or "HND" */
  double k_scale;        /* 1: divides numbers that become codes */
  double v_scale;
} cpattn_page_writes;

CPATTN_API cpattn_status cpattn_page_writes_init(cpattn_page_writes* writes, size_t struct_size);
CPATTN_API cpattn_status cpattn_write_pages(const cpattn_page_writes* writes);

/* Writes rows [num_tokens, num_heads, dim] of one kind, such as latents, to slots of a cache
 * [num_slots, num_heads, dim]; codes are of rows / scale. */
CPATTN_API cpattn_status cpattn_write_slots(
    const cpattn_tensor* slots, const cpattn_tensor* rows, const cpattn_tensor* cache, double scale
);

/* --- context parallelism --------------------------------------------------------------------- */

/* The new tokens of a batch, to be divided over ranks. */
typedef struct cpattn_cp_batch {
  size_t struct_size;
  const cpattn_tensor* extend_lens; /* ints [bs]: new tokens of each sequence */
  const cpattn_tensor* seq_lens; /* ints [bs]: these with the cached ones; NULL: none is cached */
  int64_t cp_rank;
  int64_t cp_size;
  const char* strategy;          /* "zigzag", "interleave" or "contiguous" */
  int64_t num_tokens;            /* with padding; NONE: the sum of extend_lens */
  const char* kv_len_convention; /* "baked" or "bare" */
  int64_t compat;                /* 0 */
  const cpattn_tensor* weights;  /* float64 [cp_size]: speed of the ranks; NULL: all equal */
  int64_t page_size;             /* positions on whose multiples blocks begin; NONE: any */
} cpattn_cp_batch;

CPATTN_API cpattn_status cpattn_cp_batch_init(cpattn_cp_batch* batch, size_t struct_size);

/* One rank's share of a batch. Its fields have the names of Python's ContextParallelMetadata. */
typedef struct cpattn_cp_metadata cpattn_cp_metadata;

CPATTN_API cpattn_status
cpattn_build_cp_metadata(const cpattn_cp_batch* batch, cpattn_cp_metadata** metadata);
/* A new object with equally many rows on every rank. */
CPATTN_API cpattn_status
cpattn_cp_metadata_pad_to_physical(const cpattn_cp_metadata* metadata, cpattn_cp_metadata** padded);
CPATTN_API void cpattn_cp_metadata_destroy(cpattn_cp_metadata* metadata); /* NULL is nothing */

/* A number: cp_rank, cp_size, bs, total_seq_lens, total_q_prev_tokens, total_q_next_tokens,
 * max_seqlen_q_prev, max_seqlen_q_next, max_seqlen_q_combined. CPATTN_NONE if the strategy has
 * no such field. */
CPATTN_API cpattn_status
cpattn_cp_metadata_int(const cpattn_cp_metadata* metadata, const char* name, int64_t* value);
/* The array of a list or tensor field in Python, such as "zigzag_index",
 * "kv_len_prev_tensor", "split_list", "local_q_indices" or "rows_per_request". It lives as long as
 * the metadata. `values` is NULL if the strategy has no such field. */
CPATTN_API cpattn_status cpattn_cp_metadata_array(
    const cpattn_cp_metadata* metadata, const char* name, const int32_t** values, int64_t* size
);

/* --- top-k selection of sparse attention ----------------------------------------------------- */

enum { CPATTN_TOPK_PAGED = 1, CPATTN_TOPK_RAGGED = 2 };

typedef struct cpattn_topk_options {
  size_t struct_size;
  const cpattn_tensor* logits; /* float32 [num_tokens, num_keys] */
  int64_t topk;
  int64_t method; /* CPATTN_TOPK_PAGED, CPATTN_TOPK_RAGGED, or NONE: indices as they are */
  const cpattn_tensor* lengths;             /* ints [num_tokens]: candidates of each row */
  const cpattn_tensor* page_table;          /* ints [num_sequences, pages]: paged needs it */
  const cpattn_tensor* cu_seqlens_q;        /* ints [num_sequences + 1]; NULL: one for each row */
  const cpattn_tensor* topk_indices_offset; /* ints [num_tokens]: ragged needs it */
  const cpattn_tensor* row_starts;          /* ints [num_tokens]: first candidate; NULL: 0 */
  const cpattn_tensor* batch_idx_list;      /* ints [num_sequences]: rows of page_table */
  int64_t page_size;                        /* 1 */
  int64_t sorted;                           /* 1: by score, descending; 0: by index */
  const cpattn_tensor* out;                 /* int32 [num_tokens, topk] */
} cpattn_topk_options;

CPATTN_API cpattn_status cpattn_topk_options_init(cpattn_topk_options* options, size_t struct_size);
/* If the table has no page for a selected key, some rows of `out` may have been written. */
CPATTN_API cpattn_status cpattn_topk_transform(const cpattn_topk_options* options);

/* --- transfers of caches --------------------------------------------------------------------- */

/* The tokens of a buffer to digest, and the place of the buffer in the model. */
typedef struct cpattn_kv_digest {
  size_t struct_size;
  const cpattn_tensor* tensor; /* a cache of four dimensions, as of cpattn_layer; pages may lie */
  const cpattn_tensor* pages;  /*   apart. ints: the pages of a sequence, in its order */
  int64_t layer_id;            /* of the whole model */
  const char* kind;            /* "k", "v", "index_k", "state", "k_scale" or "v_scale" */
  const char* kv_layout;       /* "NHD" or "HND" */
  int64_t start;               /* the token with which `pages` begin */
  int64_t first_token;         /* NONE: start */
  int64_t num_tokens;          /* NONE: to the end of the pages */
  int64_t block_tokens;        /* positions of one sum, the same on both sides */
  int64_t tp_rank;
  int64_t tp_size;
  int64_t total_kv_heads; /* of the model, 1 for a latent; NONE: the cache has all heads */
  int64_t dcp_rank;
  int64_t dcp_size;
  int64_t dcp_interleave;
  int64_t shard_rank;
  int64_t shard_size;
  int32_t is_draft;
  int32_t num_threads;
} cpattn_kv_digest;

CPATTN_API cpattn_status cpattn_kv_digest_init(cpattn_kv_digest* digest, size_t struct_size);
/* Writes a sum for each block of positions, from the block of the first token to that of the last:
 * num_sums in all. Two sides that hold the same bytes have the same sums, wherever they keep them;
 * sums of ranks with other heads or tokens add up, modulo 2^64.
 * `num_rows`, if it is not NULL, is the number of rows of a token and a head. */
CPATTN_API cpattn_status
cpattn_digest(const cpattn_kv_digest* digest, uint64_t* sums, int64_t num_sums, int64_t* num_rows);

/* --- the machine ----------------------------------------------------------------------------- */

/* Threads of calls that give no number, including the caller's. Results do not depend on it. */
CPATTN_API cpattn_status cpattn_set_num_threads(int32_t num_threads);
CPATTN_API cpattn_status cpattn_get_num_threads(int32_t* num_threads);

/* The instruction set in use, such as "avx512": the best one here, or CPATTN_ISA's. */
CPATTN_API cpattn_status cpattn_active_isa(const char** name);

#ifdef __cplusplus
}
#endif

#endif /* CPATTN_H */
