"""Private runs over several ranks of torch.distributed. `make_private` finds the ranks and the layout of the model.

ranks     the control messages of a run, on a gloo group of its own
layouts   how a model is divided among the ranks: replicated, or in one of the two ways below; refusals
dtensors  what these two have in common
sharded   models sharded by `fully_shard`
tensor_parallel  models split by `parallelize_module`
sums      the reduction of clipped sums over ranks, in buckets
followers copies of the ledger on the ranks other than 0
checkpoints `save` and `load` by torch.distributed.checkpoint
"""

from clipwise.distributed.checkpoints import load, save

__all__ = ["load", "save"]
