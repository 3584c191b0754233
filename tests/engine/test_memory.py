from __future__ import annotations

from relaykv.engine.memory import kv_memory_bytes

GB = 1 << 30


class FakeMemory:
    """80 GB, of which other processes hold 2 and this one's weights 16."""

    def __init__(self) -> None:
        self.allocated = 16 * GB
        self.peak = 40 * GB  # of loading, before the trial

    def total_bytes(self) -> int:
        return 80 * GB

    def free_bytes(self) -> int:
        return 80 * GB - 2 * GB - self.allocated

    def allocated_bytes(self) -> int:
        return self.allocated

    def peak_bytes(self) -> int:
        return self.peak

    def reset_peak(self) -> None:
        self.peak = self.allocated

    def run_step(self, num_bytes: int) -> None:
        self.peak = max(self.peak, self.allocated + num_bytes)


def test_the_cache_gets_what_weights_activations_and_others_leave_of_the_share() -> None:
    memory = FakeMemory()

    num_bytes = kv_memory_bytes(memory, 0.9, lambda: memory.run_step(3 * GB))

    reserve = GB // 2
    assert num_bytes == 80 * GB * 9 // 10 - 2 * GB - 16 * GB - 3 * GB - reserve


def test_what_loading_took_for_a_moment_does_not_count() -> None:
    memory = FakeMemory()

    assert kv_memory_bytes(memory, 1.0, lambda: None) == (80 - 2 - 16) * GB - GB // 2


def test_a_share_below_the_weights_leaves_less_than_nothing() -> None:
    memory = FakeMemory()

    assert kv_memory_bytes(memory, 0.1, lambda: None) < 0
