# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of training: float16 safetensors in parts, whose metadata holds the model's configuration.

`python -m training.checkpoint RUN FILE` joins the model's tensors into one file, which the node takes as `checkpoint`.
"""
from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lingbot_map_ros.gct import GCTConfig
from lingbot_map_ros.gct.checkpoint import CONFIG_KEY

PART_BYTES = 14_000_000  # at most: hosts limit the size of files
MODEL, AUXILIARY = "model.", "auxiliary."
STATE = "state.json"


def save_checkpoint(folder: Path, model: nn.Module, auxiliary: nn.Module, config: GCTConfig, state: dict) -> None:
    """Write weights in parts, and `state` (JSON: step, seed and what else a run goes on from) to a folder."""
    tensors = {MODEL + name: tensor for name, tensor in model.state_dict().items()}
    tensors |= {AUXILIARY + name: tensor for name, tensor in auxiliary.state_dict().items()}
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        tensor = tensor.detach().to("cpu", torch.float16).contiguous()
        if size + tensor.nbytes > PART_BYTES and parts[-1]:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += tensor.nbytes
    folder.mkdir(parents=True, exist_ok=True)
    # Under other names first: a run that is cut off while it writes leaves the checkpoint before.
    written = []
    for index, part in enumerate(parts, start=1):
        written.append(folder / f"weights-{index}-of-{len(parts)}.safetensors.new")
        save_file(part, written[-1], metadata={CONFIG_KEY: config.to_json()})
    for old in folder.glob("weights-*.safetensors"):
        old.unlink()
    for file in written:
        file.rename(file.with_suffix(""))
    (folder / STATE).write_text(json.dumps(state, indent=2) + "\n")


def read_weights(path: Path) -> tuple[GCTConfig, dict[str, Tensor], dict[str, Tensor]]:
    """Read a folder of parts or one file as the package ships it: configuration, the model's and the auxiliary tensors.

    Raises FileNotFoundError where there are none, ValueError where parts are missing or say no configuration.
    """
    files = sorted(path.glob("weights-*.safetensors")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise FileNotFoundError(f"no weights at {path}")
    if path.is_dir() and not files[0].name.endswith(f"-of-{len(files)}.safetensors"):
        raise ValueError(f"{path} holds {len(files)} parts of weights, but {files[0].name} among them")
    config, model, auxiliary = None, {}, {}
    for file in files:
        with safe_open(file, framework="pt", device="cpu") as content:
            metadata = content.metadata() or {}
            if CONFIG_KEY not in metadata:
                raise ValueError(f"{file} does not say the model's configuration")
            config = GCTConfig.from_json(metadata[CONFIG_KEY])
            for name in content.keys():
                tensor = content.get_tensor(name).float()
                if name.startswith(AUXILIARY):
                    auxiliary[name.removeprefix(AUXILIARY)] = tensor
                else:
                    model[name.removeprefix(MODEL)] = tensor
    return config, model, auxiliary


def read_state(folder: Path) -> dict:
    """Return what `save_checkpoint` was given as `state`."""
    return json.loads((folder / STATE).read_text())


def join(folder: Path, file: Path, others: Sequence[tuple[Path, float]] = ()) -> None:
    """Write the model's tensors of a folder into one file.

    others: folders or files whose weights enter a mean with the run's, and the share of each. Raises ValueError where
    they are another model's, or where shares are negative or beyond 1 in all.
    """
    config, model, _ = read_weights(folder)
    own = 1 - sum(share for _, share in others)
    if not (own >= -1e-9 and all(share >= 0 for _, share in others)):  # not: so that NaN is refused too
        raise ValueError(f"shares must be at least 0 and at most 1 in all, not {[share for _, share in others]}")
    mean = {name: own * tensor for name, tensor in model.items()}
    for other, share in others:
        _, weights, _ = read_weights(other)
        if {name: tensor.shape for name, tensor in weights.items()} != {
                name: tensor.shape for name, tensor in model.items()}:
            raise ValueError(f"{other} holds another model's weights than {folder}")
        for name, tensor in weights.items():
            mean[name] += share * tensor
    save_file({name: tensor.half() for name, tensor in mean.items()}, file, metadata={CONFIG_KEY: config.to_json()})


def main() -> None:
    """Join the parts of a run's weights."""
    parser = argparse.ArgumentParser(prog="python -m training.checkpoint", description=main.__doc__)
    parser.add_argument("run", type=Path, help="folder that training wrote")
    parser.add_argument("file", type=Path, help="file to write, .safetensors")
    parser.add_argument("--other", nargs=2, action="append", default=[], metavar=("WEIGHTS", "SHARE"),
                        help="folder or file of weights that enter a mean with the run's, by this share; repeatable")
    options = parser.parse_args()
    try:
        others = [(Path(path), float(share)) for path, share in options.other]
        join(options.run, options.file, others)
    except (OSError, ValueError, SafetensorError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
