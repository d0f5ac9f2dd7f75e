"""Reasons against a Tensor-Train table."""

from __future__ import annotations

from torchrec_hkv.tensor_train.shapes import TTShape


def why_dense_is_smaller(shape: TTShape, element_size: int, cached_rows: int = 0) -> str | None:
    """A sentence if a table takes more memory as cores than as rows; None otherwise.

    Optimizer states are not counted.

    Args:
        shape: shape of the table.
        element_size: bytes of an element of the cores, and of dense rows.
        cached_rows: number of cached float32 rows.
    """
    cores = shape.num_elements * element_size
    cache = 4 * cached_rows * shape.embedding_dim
    dense = shape.num_embeddings * shape.embedding_dim * element_size
    if cores + cache <= dense:
        return None
    sizes_text = f"cores take {cores:,} bytes"
    advice = f"lower the ranks, which are {list(shape.ranks)}, or give a compression_ratio"
    if cache:
        sizes_text += f" and its cached rows {cache:,}"
        advice += ", make the cache smaller"
    return (
        f"its {sizes_text}, but {shape.num_embeddings:,} dense rows of {shape.embedding_dim} would "
        f"take {dense:,}: {advice}, or keep the table dense."
    )
