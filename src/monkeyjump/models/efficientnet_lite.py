"""EfficientNet-Lite0 without its classifier: what `vlm-tiny` sees pictures with."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

WIDTH = 1280
# repeats, kernel, stride, expansion, width: EfficientNet-Lite0
STAGES = (
    (1, 3, 1, 1, 16), (2, 3, 2, 6, 24), (2, 5, 2, 6, 40), (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112), (4, 5, 2, 6, 192), (1, 3, 1, 6, 320),
)  # fmt: skip


class Convolution(nn.Conv2d):
    """A convolution with its normalisation folded in, padded as TensorFlow pads: more on the right and below."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, act: bool = True):
        super().__init__(inputs, outputs, kernel, stride, groups=groups)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        (kernel, _), (stride, _) = self.kernel_size, self.stride
        missing = [max((-(-side // stride) - 1) * stride + kernel - side, 0) for side in x.shape[2:]]
        if any(missing):
            down, right = missing
            x = functional.pad(x, (right // 2, right - right // 2, down // 2, down - down // 2))
        x = super().forward(x)
        return functional.relu6(x) if self.act else x


class Inverted(nn.Sequential):
    """Widen, look around in every channel by itself, narrow; what came in is added where it fits."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        wide = inputs * expansion
        first = [Convolution(inputs, wide, 1)] if expansion > 1 else []
        around = Convolution(wide, wide, kernel, stride, groups=wide)
        super().__init__(*first, around, Convolution(wide, outputs, 1, act=False))
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return x + y if self.adds else y


class EfficientNetLite(nn.Module):
    """[N, 3, 224, 224] -> [N, 1280, 7, 7]"""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [Convolution(3, 32, 3, 2)]
        width = 32
        for repeats, kernel, stride, expansion, outputs in STAGES:
            for number in range(repeats):
                layers.append(Inverted(width, outputs, kernel, 1 if number else stride, expansion))
                width = outputs
        self.layers = nn.Sequential(*layers, Convolution(width, WIDTH, 1))

    def forward(self, pixels: Tensor) -> Tensor:
        return self.layers(pixels)


def folded(published: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Weight and bias of every convolution, in order, from published weights with separate normalisations."""
    found = []
    convolutions = [name for name in published if "conv" in name and name.endswith(".weight")]
    norms = [name.removesuffix(".running_mean") for name in published if name.endswith(".running_mean")]
    for convolution, norm in zip(convolutions, norms, strict=True):
        mean, variance = published[f"{norm}.running_mean"], published[f"{norm}.running_var"]
        scale = published[f"{norm}.weight"] / (variance + 1e-3).sqrt()
        found.append((published[convolution] * scale.view(-1, 1, 1, 1), published[f"{norm}.bias"] - mean * scale))
    return found
