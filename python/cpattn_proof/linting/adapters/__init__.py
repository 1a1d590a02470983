# SPDX-License-Identifier: Apache-2.0
"""Documents from plans of engines and libraries, a module for each kind; none imports an engine.

``context_parallel``  metadata of cpattn and sglang, plans of cpattn
``shards``            plans and writes of sharded KV pools, of cpattn and sglang
``dsa``               metadata of DSA layers with a line for each row, as in sglang on Ascend
``selections``        keys that sparse attention selects, over all ranks
``decode``            lengths and local block tables of decode context parallelism, as in vLLM
``pcp``               segments of prefill context parallelism, as in vLLM
``units``             units of several rows, as in compressors and convolutions
``relayouts``         rows on their way between layers of two kinds
``packings``          packed sequences (cu_seqlens) of ring-flash-attn and Megatron
``transfers``         buffers and descriptors of both sides of a KV transfer
``captures``          recorded runs of all ranks: batches and messages

``runs`` converts lists of tokens to the runs of documents.
"""
