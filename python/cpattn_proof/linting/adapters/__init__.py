# SPDX-License-Identifier: Apache-2.0
"""Documents of what engines and libraries planned; a module for each kind, none imports an engine.

``context_parallel``  metadata of cpattn and sglang, plans of cpattn
``shards``            plans and writes of KV pools that ranks share, of cpattn and sglang
``dsa``               metadata of DSA layers with a line for each row, as sglang's on Ascend
``selections``        keys that sparse attention selects, over all ranks
``decode``            lengths and local block tables of decode context parallelism, as vLLM has them
``pcp``               segments of prefill context parallelism, as vLLM has them
``units``             units made of several rows, as compressors and convolutions compute them
``relayouts``         rows on their way between layers of two kinds
``packings``          packed sequences (cu_seqlens) of ring-flash-attn and Megatron
``transfers``         buffers and descriptors of both sides of a KV transfer
``captures``          recorded runs of all ranks: batches, and what was sent

``runs`` turns lists of tokens into the runs of documents.
"""
