"""Discrete events: the engine's own policies over a trace, with predicted times for steps.

A step decodes what the policy says, in mini-batches, and prefills whom it admits. A sequence stays
on the worker and in the mini-batch that it was admitted to. The clock moves by the predicted time
of the step, and over idle time to the next arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.perfmodel.model import ServingModel
from fastdecode_rdma.perfmodel.planner import BLOCK_TOKENS
from fastdecode_rdma.perfmodel.traces import Request
from fastdecode_rdma.scheduler import Costs, Job, Scheduler, SchedulerOptions, StepPlan

MakeScheduler = Callable[[SchedulerOptions], Scheduler]
MAX_IDLE_STEPS = 10_000
"""Steps in a row in which a policy that has work runs nobody: it never will."""


class SimulatedRoom:
    """KV-cache of simulated workers, in blocks; a new sequence goes to the worker that has the most
    room in proportion to its speed."""

    def __init__(self, model: ServingModel, num_requests: int) -> None:
        capacity = np.array([worker.capacity_bytes for worker in model.workers])
        block_bytes = model.shape.num_layers * model.shape.kv_token_bytes(model.kv_dtype)
        self._free = np.floor(capacity / (block_bytes * BLOCK_TOKENS)).astype(np.int64)
        self._weight = model.shares / model.shares.max()
        self.worker = np.full(num_requests, -1, np.int64)
        self._blocks = [0] * num_requests
        self._tokens = [0] * num_requests  # room held, in tokens
        self._held = np.zeros(len(model.workers), np.float64)

    @property
    def most_tokens(self) -> int:
        """Of the longest sequence that fits on an empty worker."""
        return int(self._free.max()) * BLOCK_TOKENS

    def reserve(self, handle: int, num_tokens: int) -> bool:
        """Makes sure that a sequence may hold num_tokens; False (and no change) if it may not."""
        if num_tokens <= self._tokens[handle]:
            return True
        if self.worker[handle] < 0:
            return self.reserve_gang([handle], num_tokens)
        more = -(-num_tokens // BLOCK_TOKENS) - self._blocks[handle]
        worker = self.worker[handle]
        if more > self._free[worker]:
            return False
        self._take(handle, worker, more)
        return True

    def reserve_gang(self, handles: Sequence[int], num_tokens: int) -> bool:
        """Like reserve, for new sequences that must share a worker; all or none."""
        blocks = -(-num_tokens // BLOCK_TOKENS)
        load = (self._held + blocks) / self._weight
        fits = self._free >= blocks * len(handles)
        if not fits.any():
            return False
        worker = int(np.argmin(np.where(fits, load, np.inf)))
        for handle in handles:
            self.worker[handle] = worker
            self._take(handle, worker, blocks)
        return True

    def fits_after(self, released: Sequence[int], handles: Sequence[int], num_tokens: int) -> bool:
        """Whether `handles` could hold num_tokens each once `released` have given back theirs."""
        free = self._free.copy()
        for handle in released:
            free[self.worker[handle]] += self._blocks[handle]
        blocks = -(-num_tokens // BLOCK_TOKENS)
        worker = self.worker[handles[0]]
        if worker >= 0:
            return bool(blocks - self._blocks[handles[0]] <= free[worker])
        return bool((free >= blocks * len(handles)).any())

    def _take(self, handle: int, worker: int, blocks: int) -> None:
        self._free[worker] -= blocks
        self._held[worker] += blocks
        self._blocks[handle] += blocks
        self._tokens[handle] = self._blocks[handle] * BLOCK_TOKENS

    def release(self, handle: int) -> None:
        """Gives back all that `handle` had reserved."""
        worker = self.worker[handle]
        if worker >= 0:
            self._take(handle, worker, -self._blocks[handle])
            self.worker[handle] = -1


@dataclass
class Load:
    """What one step did. Seconds, sequences, cached tokens that were decoded over."""

    start_s: float
    step_s: float
    num_decoded: int
    cached_tokens: int
    num_running: int
    num_waiting: int


@dataclass
class Outcome:
    """What came of each request, in order of the trace, [requests]; and every step."""

    requests: list[Request]
    first_token_s: np.ndarray
    finish_s: np.ndarray
    loads: list[Load] = field(default_factory=list)
    num_preemptions: int = 0

    @property
    def latency_per_token_s(self) -> np.ndarray:
        """From arrival to the last token, over tokens generated."""
        arrival = np.array([request.arrival_s for request in self.requests])
        tokens = np.array([request.output_len for request in self.requests])
        return (self.finish_s - arrival) / tokens

    @property
    def time_to_first_token_s(self) -> np.ndarray:
        return self.first_token_s - np.array([request.arrival_s for request in self.requests])

    @property
    def makespan_s(self) -> float:
        return float(self.finish_s.max() - min(request.arrival_s for request in self.requests))

    @property
    def tokens_per_s(self) -> float:
        return sum(request.output_len for request in self.requests) / self.makespan_s


class Simulation:
    """One run. Limits are those of SchedulerOptions; its clock is the simulation's. costs: what the
    policy is told instead of the model's own predictions."""

    def __init__(
        self,
        model: ServingModel,
        requests: Sequence[Request],
        make: MakeScheduler,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int = 2048,
        max_load_tokens: int | None = None,
        costs: Costs | None = None,
    ) -> None:
        self.now_s = 0.0
        self.model = model
        self.policy = make(
            SchedulerOptions(
                max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
                max_load_tokens=max_load_tokens, clock=lambda: self.now_s, costs=costs or model,
                block_tokens=BLOCK_TOKENS,
            )
        )  # fmt: skip
        count = len(requests)
        self.room = SimulatedRoom(model, count)
        self._jobs = [
            Job(i, request.prompt_len, request.prompt_len, request.output_len, i)
            for i, request in enumerate(requests)
        ]
        self._tokens = np.array([request.prompt_len for request in requests], np.int64)
        self._ends = self._tokens + [request.output_len for request in requests]
        self._minibatch = np.zeros(count, np.int64)
        # [mini-batches, workers]: every worker serves all mini-batches alike
        self._members = np.zeros((model.num_minibatches, len(model.workers)), np.int64)
        self._home = np.zeros(count, np.int64)  # worker, as long as it counts there
        self.outcome = Outcome(list(requests), np.full(count, np.nan), np.full(count, np.nan))
        longest = int(self._ends.max(initial=0)) + 1
        if longest > self.room.most_tokens:
            raise ConfigError(
                f"a sequence of {longest} tokens fits on no worker: the largest holds "
                f"{self.room.most_tokens}"
            )

    def run(self) -> Outcome:
        """Simulates until all have finished.

        Raises:
            ConfigError: the policy leaves somebody waiting for ever.
        """
        requests, policy = self.outcome.requests, self.policy
        arrived = idle = 0
        while arrived < len(requests) or policy.has_work():
            if not policy.has_work():
                self.now_s = max(self.now_s, requests[arrived].arrival_s)
            while arrived < len(requests) and requests[arrived].arrival_s <= self.now_s:
                policy.add([self._jobs[arrived]])
                arrived += 1
            plan = policy.schedule(self.room)
            for handle in plan.preempted:
                self._leave(handle)
            self.outcome.num_preemptions += len(plan.preempted)
            if not (plan.decode or plan.prefill):
                idle += 1
                if idle > MAX_IDLE_STEPS:
                    raise ConfigError(
                        "the policy runs nobody though there is work: limits are too tight"
                    )
                if not plan.preempted and arrived < len(requests):
                    self.now_s = max(self.now_s, requests[arrived].arrival_s)
                continue
            idle = 0
            self._step(plan)
        return self.outcome

    def _step(self, plan: StepPlan) -> None:
        decode = np.array(plan.decode, np.int64)
        start_s = self.now_s
        decode_s, cached = self._decode_s(decode)
        started = [handle for gang in plan.prefill for handle in gang]
        prompts = [self._jobs[gang[0]].num_tokens for gang in plan.prefill]
        prefill_s = self.model.prefill_many_s(prompts)
        self.now_s += decode_s + prefill_s
        self.outcome.loads.append(
            Load(start_s, self.now_s - start_s, len(decode), cached,
                 self.policy.num_running, self.policy.num_waiting)
        )  # fmt: skip
        self._place(started)
        ran = np.concatenate([decode, np.array(started, np.int64)])
        jobs = self._jobs
        for handle in plan.decode:
            jobs[handle].num_tokens += 1
        for handle in started:
            jobs[handle].num_tokens += 1
            if np.isnan(self.outcome.first_token_s[handle]):
                self.outcome.first_token_s[handle] = self.now_s
        self._tokens[ran] += 1
        self.policy.observe(sum(prompts), prefill_s, len(decode), cached, decode_s)
        for handle in ran[self._tokens[ran] >= self._ends[ran]].tolist():
            self.outcome.finish_s[handle] = self.now_s
            self.policy.remove(handle)
            self.room.release(handle)
            self._leave(handle)

    def _place(self, started: Sequence[int]) -> None:
        """Puts new sequences into the mini-batch with the fewest: on their worker, then in all."""
        totals = self._members.sum(1)
        for handle in started:
            worker = self.room.worker[handle]
            fewest = int(np.lexsort((totals, self._members[:, worker]))[0])
            self._minibatch[handle], self._home[handle] = fewest, worker
            self._members[fewest, worker] += 1
            totals[fewest] += 1

    def _leave(self, handle: int) -> None:
        self._members[self._minibatch[handle], self._home[handle]] -= 1

    def _decode_s(self, decode: np.ndarray) -> tuple[float, int]:
        """Predicted seconds, and cached tokens, of the sequences that decode."""
        if not len(decode):
            return 0.0, 0
        model, workers = self.model, len(self.model.workers)
        place = self._minibatch[decode] * workers + self.room.worker[decode]
        shape = (model.num_minibatches, workers)
        size = shape[0] * workers
        rows = np.bincount(place, minlength=size).reshape(shape).astype(np.float64)
        tokens = np.bincount(place, weights=self._tokens[decode], minlength=size).reshape(shape)
        attention = [model.attention_s(*pair) for pair in zip(rows, tokens, strict=True)]
        step_s = model.step_s(rows.sum(1).tolist(), attention, rows.max(1).tolist())
        return step_s, int(tokens.sum())
