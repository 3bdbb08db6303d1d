"""Where copies between host and simulated device run, and who waits for whom: for messages, it judges nothing."""

from __future__ import annotations

from typing import Any

from lab.measure import device, placement, roofline


class Traffic:
    """Of each phase: on which stream copies run, how long the host stands still, and which stream waits for which.

    The stream of the work is the one that is current at first; any other is a side stream.
    """

    def __init__(self, gpu: Any) -> None:
        self.gpu, self.work, self.phase = gpu, gpu.stream, "forward"
        self.told: dict[str, dict] = {}
        self.made: dict[int, Any] = {}  # by id of an event, the stream that it marks; kept with it, ids come again
        self._around(roofline.RooflineMode, "_transfer")
        self._around(placement, "upload")
        self._around(placement, "download")
        wait, record, until = device.Stream.wait_event, device.Event.record, gpu.wait_until

        def recorded(event: Any, stream: Any = None) -> None:
            self.made[id(event)] = event, stream or gpu.stream
            record(event, stream)

        def waited(stream: Any, event: Any) -> None:
            if id(event) in self.made:
                key = self._told(stream, self.made[id(event)][1])
                self.of["waits"][key] = self.of["waits"].get(key, 0) + 1
            wait(stream, event)

        def stood(end: float) -> None:
            self.of["stood"] += 1
            self.of["stood_s"] += max(0.0, end - gpu.now)
            until(end)

        device.Event.record, device.Stream.wait_event, gpu.wait_until = recorded, waited, stood

    @property
    def of(self) -> dict:
        empty = {"copies": 0, "on_work": 0, "held": 0, "stood": 0, "stood_s": 0.0, "waits": {}, "blocking": {}}
        return self.told.setdefault(self.phase, empty)

    def _told(self, stream: Any, other: Any) -> str:
        who = "the stream of the work" if stream is self.work else "a side stream"
        if other is stream:
            return f"{who} for itself"
        aside = "another side stream" if stream is not self.work else "a side stream"
        return f"{who} for {'the stream of the work' if other is self.work else aside}"

    def _around(self, owner: Any, name: str) -> None:
        """Note copies, and whether the host waited in them."""
        real = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            launches, before = self.gpu.launches, self.of["stood"]
            result = real(*args, **kwargs)
            if self.gpu.launches > launches:
                self.of["copies"] += 1
                self.of["on_work"] += self.gpu.stream is self.work
                self.of["held"] += self.of["stood"] > before
                if self.of["stood"] > before:
                    key = "copy_" if name == "_transfer" else ".cpu(), .cuda() or .to()"
                    self.of["blocking"][key] = self.of["blocking"].get(key, 0) + 1
            return result

        setattr(owner, name, noted)
