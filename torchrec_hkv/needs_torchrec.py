"""Imported first by packages that need TorchRec; explains how to install it if it is missing."""

try:
    import torchrec  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"torchrec_hkv needs TorchRec and FBGEMM, and there is no module {error.name!r}: install "
        "torchrec with fbgemm-gpu or fbgemm-gpu-cpu in the versions that docs/guide/install.md "
        "lists for this torch. Only torchrec_hkv.serving loads models without them.",
        name=error.name,
    ) from None
