"""A plain ResNet-50 for measurements, with the sizes of the paper (He et al. 2015)."""

from __future__ import annotations

import torch
from torch import nn

_STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))  # width and number of blocks
_EXPANSION = 4


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = _convolution(inputs, width, 1), _convolution(width, width, 3, stride)
        self.third = _convolution(width, _EXPANSION * width, 1)
        fits = stride == 1 and inputs == _EXPANSION * width
        self.shortcut: nn.Module = nn.Identity() if fits else _convolution(inputs, _EXPANSION * width, 1, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.third(self.relu(self.second(self.relu(self.first(x)))))
        return self.relu(inner + self.shortcut(x))


def resnet50(classes: int = 1000) -> nn.Module:
    layers: list[nn.Module] = [_convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for stage, (width, count) in enumerate(_STAGES):
        for index in range(count):
            layers.append(Bottleneck(inputs, width, 2 if stage and not index else 1))
            inputs = _EXPANSION * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
