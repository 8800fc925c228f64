"""Tensors in, tensors out: the mathematics of adapters and routers, and the only place that imports Triton.

The way of a projection's product, from the call of the model to the kernel:

| file | what it does |
|---|---|
| `dispatch` | decides whether the kernels or torch compute, from the tensor, the environment and a switch |
| `reference` | defines every op in torch: what the kernels are tested against, and what runs without them |
| `lowrank` | holds the parts of an update: tensors of a projection, gates, strengths, dropout mask |
| `gated_lora` | computes the projections that read one input as one autograd node, in eager mode and compiled |
| `grouped_products` | has the products of that node and of its gradient, as plain functions and as registered ops |
| `registration` | registers an op with torch.compile so that a call costs the host little |
| `kernels/lora` | chooses the kernels of a low-rank product by its sizes |
| `kernels/lora_few_tokens` | does the whole update in one launch, for a step of generation |
| `kernels/lora_sums` | computes low ranks by plain sums |
| `kernels/lora_products` | computes higher ranks on the matrix units |
| `kernels/lora_operands` | loads gates, scales, masks and base outputs inside those kernels |
| `kernels/dot` | multiplies two tiles, as exactly as their use needs |
| `kernels/partial_sums` | adds up sums over tokens in a fixed order |
| `kernels/tiles` | has the block sizes of all kernels and loads rows tile by tile |
| `kernels/launch` | launches a kernel again without asking Triton what kind of arguments it has |

Besides: `routing` (centroid router, `kernels/route`), `router_logits` (learned routers), `propulsion`
(`kernels/propulsion`), `linear_cross_entropy`, `precision` (what stays in fp32) and `kernels/kmeans`.
"""
