"""The compute kernels that TorchRec's lookups call, and their optimizers."""
