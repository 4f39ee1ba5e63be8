"""PyTorch's own tests of DDP, as installed with torch, run against `FusedDDP` on two ranks.

``ddp_tests.tsv`` lists every one of them. None of their code is here: `runner` imports them from
the wheel and puts `FusedDDP` where they look for ``DistributedDataParallel``; most of them were
written for GPUs and run on CPU under `shim`. ``python -m tests.conformance --help`` runs them by
hand, with torch's DDP as well, which shows that the shim leaves them meaningful.

What passing does not prove:

- That gradients are synchronised. A DDP that neither averages gradients nor starts from equal
  parameters passed 36 of 81: they look at shapes, types or the API, or start and train equally on
  all ranks anyway. Values are held to DDP's bit for bit by ``tests/test_parity.py``.
- Anything about GPUs. Under the shim there are no streams, no events and one device.
- Anything about more than two ranks, or about a backend other than gloo.
- That errors are raised on every rank: many tests accept an error on one.
"""
