"""`python -m tools.graph_models`: networks as ONNX files, exported from `transformers` with random weights.

Nothing is downloaded. Biases and gains are random, and batch normalisation uses the statistics of a random batch: the
defaults (0 and 1) would hide errors, and arbitrary ones would make the values of deep networks overflow.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from coordinator.cli.output import handles_errors, out
from hearth.errors import BadSetting
from hearth.platform.units import format_bytes

OPSET = 17  # version of the ONNX operator set
_CALIBRATION_BATCH = 4  # random inputs for the statistics of batch normalisation
_TINY_LABELS = 10  # classes of a tiny classifier


class TorchNetwork(NamedTuple):
    """A torch module, and the names of its inputs and outputs."""

    module: Any
    inputs: dict[str, Any]
    outputs: tuple[str, ...]


class _Classifier(NamedTuple):
    """An image classifier of `transformers`: the start of its class names, its settings, and those of the tiny one."""

    kind: str
    settings: dict[str, Any]
    tiny: dict[str, Any]


_TINY_TRANSFORMER = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
_CLASSIFIERS = {
    "resnet50": _Classifier(
        "ResNet", {"num_labels": 1000}, {"embedding_size": 8, "hidden_sizes": [16, 24, 32, 40], "depths": [1, 2, 1, 1]}
    ),
    "mobilenet_v2": _Classifier("MobileNetV2", {"num_labels": 1001}, {"depth_multiplier": 0.25}),
    "efficientnet_b0": _Classifier(
        "EfficientNet",
        {"width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280, "image_size": 224, "num_labels": 1000},
        {"width_coefficient": 0.25, "depth_coefficient": 0.5, "hidden_dim": 320},
    ),
    "vit": _Classifier("ViT", {"image_size": 224, "num_labels": 1000}, {**_TINY_TRANSFORMER, "image_size": 64}),
}
NETWORKS = (*_CLASSIFIERS, "bert", "two_branch")


def _images(tiny: bool) -> dict[str, Any]:
    import torch

    pixels = 64 if tiny else 224
    return {"pixel_values": torch.randn(1, 3, pixels, pixels)}


def _classifier(name: str, tiny: bool) -> TorchNetwork:
    import transformers

    kind, settings, tiny_settings = _CLASSIFIERS[name]
    if tiny:
        settings = {**settings, **tiny_settings, "num_labels": _TINY_LABELS}
    config = getattr(transformers, f"{kind}Config")(**settings)
    return TorchNetwork(getattr(transformers, f"{kind}ForImageClassification")(config), _images(tiny), ("logits",))


def _bert(tiny: bool) -> TorchNetwork:
    import torch
    from transformers import BertConfig, BertModel

    config = BertConfig(**({**_TINY_TRANSFORMER, "vocab_size": 500} if tiny else {}))
    shape = (1, 16 if tiny else 128)
    mask = torch.ones(shape, dtype=torch.int64)
    mask[:, shape[1] - 3 :] = 0
    inputs = {"input_ids": torch.randint(config.vocab_size, shape), "attention_mask": mask}
    return TorchNetwork(BertModel(config), inputs, ("last_hidden_state", "pooler_output"))


def _two_branch(tiny: bool, branch_width: int | None) -> TorchNetwork:
    """A stem, two independent compute-heavy convolution branches, and a classifier over both.

    Running the branches on two devices transfers little: the stem's output to one branch, and a vector back.
    """
    import torch
    from torch import nn

    width, depth, labels = (12, 2, _TINY_LABELS) if tiny else (128, 8, 1000)
    width = branch_width or width

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
            shared = self.stem(pixel_values)
            return self.classifier(torch.cat([self.left(shared), self.right(shared)], dim=1))

    return TorchNetwork(TwoBranch(), _images(tiny), ("logits",))


def build(name: str, tiny: bool = False, branch_width: int | None = None) -> TorchNetwork:
    """Build a network in evaluation mode. Raises BadSetting for a name not in `NETWORKS`.

    `tiny`: few and narrow layers, for tests. `branch_width` (two_branch only): channels of each convolution; compute grows
    with the square.
    """
    import torch

    torch.manual_seed(0)
    if name in _CLASSIFIERS:
        network = _classifier(name, tiny)
    elif name == "bert":
        network = _bert(tiny)
    elif name == "two_branch":
        network = _two_branch(tiny, branch_width)
    else:
        raise BadSetting(setting=f"the network {name}", reason=f"it is none of {', '.join(NETWORKS)}")
    _randomise(network)
    return network


def export(network: TorchNetwork, path: Path, open_dims: dict[str, dict[int, str]] | None = None) -> Path:
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
            Tuples().eval(), tuple(network.inputs.values()), str(path), input_names=list(network.inputs),
            output_names=list(network.outputs), dynamic_axes=open_dims, opset_version=OPSET, dynamo=False,
        )  # fmt: skip
    return path


def _randomise(network: TorchNetwork) -> None:
    import torch

    with torch.no_grad():
        for module in network.module.modules():
            if isinstance(module, (torch.nn.BatchNorm2d, torch.nn.LayerNorm)):
                module.weight.normal_(1, 0.2)
            if isinstance(getattr(module, "bias", None), torch.nn.Parameter):
                module.bias.normal_(0, 0.2)
        network.module.eval()
        batch_norms = [each for each in network.module.modules() if isinstance(each, torch.nn.BatchNorm2d)]
        for module in batch_norms:
            module.momentum = 1.0  # use the statistics of the single batch that follows
            module.train()
        if batch_norms:
            batch = {name: torch.randn(_CALIBRATION_BATCH, *x.shape[1:]) for name, x in network.inputs.items()}
            network.module(**batch)
        network.module.eval()


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
@handles_errors
def main(
    name: Annotated[str, typer.Argument(help=", ".join(NETWORKS))],
    path: Annotated[Path, typer.Option("--out", help="Where to write the model.", metavar="FILE.onnx")],
) -> None:
    """Write a network as an ONNX file, with random weights."""
    export(build(name), path)
    out.print(f"{path}: {format_bytes(path.stat().st_size)}")


if __name__ == "__main__":
    app()
