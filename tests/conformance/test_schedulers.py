"""Our schedulers through our own kit."""

from deepinfra.interfaces.scheduler import Scheduler
from deepinfra.schedulers import Bucketed, Fcfs
from deepinfra.testing.scheduler import SchedulerConformance


class TestFcfs(SchedulerConformance):
    def make(self) -> Scheduler:
        return Fcfs(max_queue=64)


class TestBucketed(SchedulerConformance):
    def make(self) -> Scheduler:
        return Bucketed(edges=(4, 8, 16), max_overtakes=3, aging_steps=1, max_queue=64)


class TestBucketedWithAShortQueue(SchedulerConformance):
    def make(self) -> Scheduler:
        return Bucketed(edges=(4, 8), max_overtakes=3, aging_steps=1, max_queue=3, max_queue_tokens=20, max_queue_s=1.0)


class TestFcfsWithAShortQueue(SchedulerConformance):
    def make(self) -> Scheduler:
        return Fcfs(max_queue=2)


class TestBucketedInStrictOrder(SchedulerConformance):
    def make(self) -> Scheduler:
        return Bucketed(edges=(4, 8, 16), max_overtakes=0, aging_steps=1, step_budget_s=None, decode_share=0.0)


class TestBucketedWithATightBudget(SchedulerConformance):
    def make(self) -> Scheduler:
        return Bucketed(edges=(8,), step_budget_s=0.0012, decode_share=0.9, max_overtakes=8, aging_steps=1)
