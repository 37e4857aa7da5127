"""`python -m tools.graph_models`: networks as ONNX files, exported from `transformers` with random weights.

Nothing is downloaded. Biases and gains are random, and batch normalisation uses the statistics of a random batch: the
defaults (0 and 1) would hide errors, and arbitrary ones would make the values of deep networks overflow.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Optional

import typer

from coordinator.cli.output import handles_errors, out
from hearth.errors import BadSetting
from hearth.platform.units import format_bytes

OPSET = 17  # version of the ONNX operator set
_CALIBRATION_BATCH = 4  # random inputs for the statistics of batch normalisation


@dataclass(frozen=True)
class Size:
    """Size of a network: `image_size` in pixels, `seq_len` in tokens. `tiny`: few and narrow layers, for tests.

    `branch_width` (two_branch only): channels of each convolution; compute grows with the square.
    """

    image_size: int | None = None
    seq_len: int = 128
    batch: int = 1
    tiny: bool = False
    branch_width: int | None = None


class Network(NamedTuple):
    """A torch module whose inputs and outputs are tuples of tensors."""

    module: Any
    inputs: dict[str, Any]
    outputs: tuple[str, ...]


def _images(size: Size, usual: int) -> Any:
    import torch

    pixels = size.image_size or (64 if size.tiny else usual)
    return torch.randn(size.batch, 3, pixels, pixels)


def _classifier(config: Any, kind: str, size: Size) -> Network:
    import transformers

    module = getattr(transformers, kind)(config)
    return Network(module, {"pixel_values": _images(size, getattr(config, "image_size", 224))}, ("logits",))


def _resnet50(size: Size) -> Network:
    from transformers import ResNetConfig

    tiny = {"embedding_size": 8, "hidden_sizes": [16, 24, 32, 40], "depths": [1, 2, 1, 1]} if size.tiny else {}
    labels = 10 if size.tiny else 1000
    return _classifier(ResNetConfig(num_labels=labels, **tiny), "ResNetForImageClassification", size)


def _mobilenet_v2(size: Size) -> Network:
    from transformers import MobileNetV2Config

    shape = {"depth_multiplier": 0.25, "num_labels": 10} if size.tiny else {"num_labels": 1001}
    return _classifier(MobileNetV2Config(**shape), "MobileNetV2ForImageClassification", size)


def _efficientnet_b0(size: Size) -> Network:
    from transformers import EfficientNetConfig

    shape: dict[str, Any] = {
        "width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280, "image_size": 224, "num_labels": 1000,
    }  # fmt: skip
    if size.tiny:
        shape |= {"width_coefficient": 0.25, "depth_coefficient": 0.5, "hidden_dim": 320, "num_labels": 10}
    return _classifier(EfficientNetConfig(**shape), "EfficientNetForImageClassification", size)


def _vit(size: Size) -> Network:
    from transformers import ViTConfig

    shape: dict[str, Any] = {"image_size": size.image_size or (64 if size.tiny else 224), "num_labels": 1000}
    if size.tiny:
        shape |= {
            "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "num_labels": 10,
        }  # fmt: skip
    return _classifier(ViTConfig(**shape), "ViTForImageClassification", size)


def _bert(size: Size) -> Network:
    import torch
    from transformers import BertConfig, BertModel

    tiny = {
        "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 500,
    }  # fmt: skip
    config = BertConfig(**(tiny if size.tiny else {}))
    shape = (size.batch, 16 if size.tiny else size.seq_len)
    mask = torch.ones(shape, dtype=torch.int64)
    mask[:, shape[1] - 3 :] = 0
    inputs = {"input_ids": torch.randint(config.vocab_size, shape), "attention_mask": mask}
    return Network(BertModel(config), inputs, ("last_hidden_state", "pooler_output"))


def _two_branch(size: Size) -> Network:
    """A stem, two independent compute-heavy convolution branches, and a classifier over both.

    Running the branches on two devices transfers little: the stem's output to one branch, and a vector back.
    """
    from torch import nn

    width, depth, labels = (12, 2, 10) if size.tiny else (128, 8, 1000)
    width = size.branch_width or width

    def layer(before: int, after: int, kernel: int, stride: int) -> nn.Sequential:
        convolution = nn.Conv2d(before, after, kernel, stride, kernel // 2)
        return nn.Sequential(convolution, nn.BatchNorm2d(after), nn.ReLU())

    def branch(kernel: int) -> nn.Sequential:
        layers = [layer(width // 4, width, kernel, 1), *(layer(width, width, 3, 1) for _ in range(depth))]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())

    class TwoBranch(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(layer(3, width // 8, 3, 2), layer(width // 8, width // 4, 3, 4))
            self.left, self.right = branch(3), branch(5)
            self.classifier = nn.Linear(2 * width, labels)

        def forward(self, pixel_values: Any) -> Any:
            import torch

            shared = self.stem(pixel_values)
            return self.classifier(torch.cat([self.left(shared), self.right(shared)], dim=1))

    return Network(TwoBranch(), {"pixel_values": _images(size, 224)}, ("logits",))


NETWORKS: dict[str, Callable[[Size], Network]] = {
    "resnet50": _resnet50,
    "mobilenet_v2": _mobilenet_v2,
    "efficientnet_b0": _efficientnet_b0,
    "bert": _bert,
    "vit": _vit,
    "two_branch": _two_branch,
}


def build(name: str, size: Size | None = None, seed: int = 0) -> Network:
    """Build a network in evaluation mode. Raises BadSetting for a name not in `NETWORKS`."""
    import torch

    if name not in NETWORKS:
        raise BadSetting(setting=f"the network {name}", reason=f"it is none of {', '.join(NETWORKS)}")
    torch.manual_seed(seed)
    network = NETWORKS[name](size or Size())
    _randomise(network)
    return network


def export(network: Network, path: Path, open_dims: dict[str, dict[int, str]] | None = None) -> Path:
    """Export a network as ONNX. `open_dims`: names of dynamic input axes, as in {"pixel_values": {0: "batch"}}."""
    import torch

    class Tuples(torch.nn.Module):  # type: ignore[misc]
        """Turns the mapping that `transformers` returns into a list of outputs."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = network.module

        def forward(self, *values: Any) -> Any:
            found = self.inner(**dict(zip(network.inputs, values, strict=True)))
            return found if isinstance(found, torch.Tensor) else tuple(found[name] for name in network.outputs)

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # about tracing, and about the newer exporter, which needs another library
        torch.onnx.export(
            Tuples().eval(),
            tuple(network.inputs.values()),
            str(path),
            input_names=list(network.inputs),
            output_names=list(network.outputs),
            dynamic_axes=open_dims,
            opset_version=OPSET,
            dynamo=False,
        )
    return path


def _randomise(network: Network) -> None:
    import torch

    norms = (torch.nn.BatchNorm2d, torch.nn.LayerNorm)
    with torch.no_grad():
        for module in network.module.modules():
            if isinstance(module, norms):
                module.weight.normal_(1, 0.2)
            if isinstance(getattr(module, "bias", None), torch.nn.Parameter):
                module.bias.normal_(0, 0.2)
        batch_norms = [each for each in network.module.modules() if isinstance(each, torch.nn.BatchNorm2d)]
        for module in batch_norms:
            module.momentum = 1.0  # use the statistics of the single batch that follows
        network.module.eval()
        if batch_norms:
            for module in batch_norms:
                module.train()
            network.module(
                **{name: torch.randn(_CALIBRATION_BATCH, *x.shape[1:]) for name, x in network.inputs.items()}
            )
        network.module.eval()


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
@handles_errors
def main(
    name: Annotated[str, typer.Argument(help=", ".join(NETWORKS))],
    path: Annotated[Path, typer.Option("--out", help="Where to write the model.", metavar="FILE.onnx")],
    image_size: Annotated[Optional[int], typer.Option(help="Pixels; the network's own if not given.", min=32)] = None,  # noqa: UP045
    seq_len: Annotated[int, typer.Option(help="Tokens.", min=4)] = 128,
    batch: Annotated[int, typer.Option(min=1)] = 1,
    open_batch: Annotated[bool, typer.Option(help="Make the batch dimension dynamic.")] = False,
    tiny: Annotated[bool, typer.Option(help="Use few and narrow layers, for tests.")] = False,
    branch_width: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="(two_branch) Channels of each convolution; compute grows with the square.", min=8),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
) -> None:
    """Write a network as an ONNX file, with random weights."""
    network = build(name, Size(image_size, seq_len, batch, tiny, branch_width), seed)
    export(network, path, {each: {0: "batch"} for each in network.inputs} if open_batch else None)
    out.print(f"{path}: {format_bytes(path.stat().st_size)}")


if __name__ == "__main__":
    app()
