# SPDX-License-Identifier: Apache-2.0
"""One run of the model from its scale frames on."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from lingbot_map_ros.gct import GCT, GCTOutput, GCTState
from lingbot_map_ros.mapping.keyframes import KeyframePolicy, Progress
from lingbot_map_ros.mapping.prediction import Prediction


class Window:
    """Feeds frames to the model in its two phases and decides which of them it keeps.

    After an error within the model the window is of no more use.
    """

    def __init__(self, model: GCT, state: GCTState) -> None:
        """Begin anew on a state, whose memory stays as it is."""
        self._model = model
        self._state = state
        state.reset()
        self._frames = 0  # since the scale frames
        self._frames_since_keyframe = 0
        self._last_keyframe: Prediction | None = None

    @property
    def is_started(self) -> bool:
        """Whether the scale frames have been run."""
        return self._last_keyframe is not None

    def is_full(self, window_size: int, policy: KeyframePolicy) -> bool:
        """Tell whether the next frame may not join: `window_size` frames are kept and it might be one more."""
        return self._state.num_kept >= window_size and policy.before(self._progress()) is not False

    def start(self, images: torch.Tensor) -> list[Prediction]:
        """Run the scale frames [n, 3, h, w] as one batch."""
        predictions = self._predictions(self._model.step(images, self._state), is_keyframe=True)
        self._last_keyframe = predictions[-1]
        return predictions

    def step(
        self, image: torch.Tensor, policy: KeyframePolicy, meanwhile: Callable[[], None] | None = None
    ) -> Prediction:
        """Run one later frame [3, h, w], and keep it if the policy says so, before or after its prediction.

        meanwhile: called when the device has been given the frame, before its prediction is waited for.
        """
        progress = self._progress()
        keep = policy.before(progress)
        output = self._model.step(image[None], self._state, keep=keep)
        prediction = self._predictions(output, is_keyframe=bool(keep))[0]
        decision = policy.after(progress, prediction) if keep is None else None
        if meanwhile is not None:
            meanwhile()
        if keep is None:
            keep = bool(decision)  # on a GPU this waits
            if keep:
                self._state.keep_last()
                prediction = replace(prediction, is_keyframe=True)
            else:
                self._state.rollback_last()
        self._frames += 1
        self._frames_since_keyframe += 1
        if keep:
            self._last_keyframe, self._frames_since_keyframe = prediction, 0
        return prediction

    def _progress(self) -> Progress:
        return Progress(self._frames, self._frames_since_keyframe, self._last_keyframe)

    def _predictions(self, output: GCTOutput, is_keyframe: bool) -> list[Prediction]:
        batches, n = vars(output), len(output.pose_encoding)
        # Copies, so that keeping one prediction does not keep its whole batch.
        return [
            Prediction(is_keyframe=is_keyframe,
                       **{name: batch[i].clone() if n > 1 else batch[i] for name, batch in batches.items()})
            for i in range(n)
        ]
