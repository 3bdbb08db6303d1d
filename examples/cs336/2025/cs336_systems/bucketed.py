"""Gradients in buckets."""

import torch
import torch.distributed as dist
from torch import nn


class DDPBucketed(nn.Module):
    def __init__(self, module: nn.Module, bucket_size_mb: float):
        super().__init__()
        self.module, self.buckets, self.bucket_of = module, [[]], {}
        size = 0
        for p in reversed([*module.parameters()]):
            dist.broadcast(p.data, src=0)
            if not p.requires_grad:
                continue
            if self.buckets[-1] and size + p.nbytes > bucket_size_mb * 2**20:
                self.buckets.append([])
                size = 0
            size += p.nbytes
            self.buckets[-1].append(p)
            self.bucket_of[p] = len(self.buckets) - 1
            p.register_post_accumulate_grad_hook(self.ready)
        self.start()

    def start(self):
        self.waiting, self.sent = [len(b) for b in self.buckets], []

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def ready(self, p):
        i = self.bucket_of[p]
        self.waiting[i] -= 1
        if self.waiting[i] == 0:
            self.send(i)

    def send(self, i):
        grads = [p.grad for p in self.buckets[i] if p.grad is not None]
        flat = torch._utils._flatten_dense_tensors(grads) / dist.get_world_size()
        self.sent.append((grads, flat, dist.all_reduce(flat, async_op=True)))

    def finish_gradient_synchronization(self):
        for i, bucket in enumerate(self.buckets):
            if self.waiting[i] and any(p.grad is not None for p in bucket):
                self.send(i)
        for grads, flat, handle in self.sent:
            handle.wait()
            for grad, mean in zip(grads, torch._utils._unflatten_dense_tensors(flat, grads), strict=True):
                grad.copy_(mean)
