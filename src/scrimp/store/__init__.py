"""Stores: where values wait for backward that the device has no room for.

A policy answers with a store where it could answer ``KEEP`` or ``DROP``, and the value's bytes go there:

>>> import torch, scrimp
>>> host = scrimp.store.Host()
>>> x = torch.randn(256, 256, requires_grad=True)
>>> with scrimp.session(policy=scrimp.policy.StoreAll(host)) as session:
...     loss = x.sin().exp().sum()
>>> session.statistics.kept.bytes, session.statistics.stored.bytes
(0, 262144)
>>> loss.backward()
>>> host.statistics.held.bytes, host.statistics.bytes_in
(0, 262144)
"""

from scrimp.store._account import StoreStatistics
from scrimp.store._disk import Disk
from scrimp.store._host import Host
from scrimp.store._store import Copy, Store
from scrimp.store._tiers import Tiers

__all__ = ["Copy", "Disk", "Host", "Store", "StoreStatistics", "Tiers"]
