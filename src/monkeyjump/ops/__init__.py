"""The mathematics of adapters and routers, as functions of tensors, and the only place that imports Triton.

`dispatch` decides whether the kernels or torch compute; `reference` defines every op in torch. A projection's product
goes through `gated_lora` (one autograd node for the projections that read one input), `grouped_products` (the products
of that node, as plain functions and as registered ops), `kernels/lora` (which chooses the kernels that suit its sizes)
and one of `kernels/lora_few_tokens`, `kernels/lora_sums` and `kernels/lora_products`.
"""
