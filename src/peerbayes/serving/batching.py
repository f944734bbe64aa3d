"""Inputs of requests that arrive together, in one forward pass."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from peerbayes.inference.prediction import Prediction

_Waiting = tuple[Tensor, "asyncio.Future[Prediction]"]


class Batcher:
    """Predicts inputs that arrive within a moment together, in a thread of its own, and gives each its own prediction.

    Draws live at addresses of the run, whatever the batch, and evaluated networks look at each input alone; so what is
    said of an input does not depend on others, but for the rounding of sums. An input that can't be predicted spoils
    its own prediction alone.

    Args:
        predict: predicts inputs (N, ...).
        most: inputs of a batch.
        wait: seconds that the first of a batch waits for others.
    """

    def __init__(self, predict: Callable[[Tensor], Prediction], most: int, wait: float) -> None:
        self.predict, self.most, self.wait = predict, most, wait
        self.batches: list[int] = []  # the sizes of the last ones
        self._waiting: asyncio.Queue[_Waiting] = asyncio.Queue()

    async def __call__(self, inputs: Sequence[Tensor]) -> Prediction:
        """Return the prediction of the inputs of a request.

        Args:
            inputs: all of one shape.
        """
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in inputs]
        for tensor, future in zip(inputs, futures, strict=True):
            self._waiting.put_nowait((tensor, future))
        try:
            return Prediction.joined(await asyncio.gather(*futures))
        finally:  # nobody waits for the others of a request that has failed, or was too slow
            for future in futures:
                future.cancel()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Predict, within the block."""
        thread = ThreadPoolExecutor(1, "peerbayes-serve-predict")
        task = asyncio.create_task(self._predict_all(thread))
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            thread.shutdown(cancel_futures=True)

    async def _predict_all(self, thread: ThreadPoolExecutor) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = [waiting for waiting in await self._together() if not waiting[1].done()]
            if not batch:
                continue
            self.batches = [*self.batches[-99:], len(batch)]
            results = await loop.run_in_executor(thread, self._each, [inputs for inputs, _ in batch])
            for (_, future), result in zip(batch, results, strict=True):
                if future.done():
                    continue
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)

    async def _together(self) -> list[_Waiting]:
        """Return what has arrived, and what arrives within a moment."""
        batch = [await self._waiting.get()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.wait if self.most > 1 else 0):
                while len(batch) < self.most:
                    batch.append(await self._waiting.get())
        return batch

    def _each(self, inputs: list[Tensor]) -> list[Prediction | Exception]:
        try:
            whole = self.predict(torch.stack(inputs))
            return [whole[index : index + 1] for index in range(len(inputs))]
        except Exception as error:
            if len(inputs) == 1:
                return [error]
            return [self._each([tensor])[0] for tensor in inputs]
