"""Sets of ATen operators by what they do to the exponents of their operands."""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


VIEWS = _names(
    """
    view _unsafe_view t transpose permute expand squeeze unsqueeze alias detach slice select split
    split_with_sizes unbind narrow unfold diagonal as_strided _reshape_alias lift_fresh movedim swapaxes
    view_as_complex view_as_real _conj real imag
    """
)
"""Operators that return their first operand with other sizes and strides."""

COPIES = _names(
    """
    clone _to_copy contiguous neg abs relu relu_ leaky_relu dropout index index_select
    """
)
"""Homogeneous operators that keep the parts of their first operand in place."""

HOMOGENEOUS = _names(
    """
    gather embedding repeat repeat_interleave flip roll masked_select reflection_pad1d reflection_pad2d
    reflection_pad3d replication_pad1d replication_pad2d replication_pad3d sum mean amax amin max min
    native_dropout cumsum tril triu upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_bilinear2d
    upsample_bicubic2d _upsample_bicubic2d_aa _upsample_bilinear2d_aa upsample_trilinear3d upsample_linear1d
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d avg_pool1d avg_pool2d
    avg_pool3d max_pool2d_with_indices max_pool3d_with_indices _adaptive_avg_pool2d _adaptive_avg_pool3d sort
    topk pixel_shuffle pixel_unshuffle im2col col2im take median neg_ abs_ channel_shuffle
    std
    """
)
"""Other homogeneous operators of degree 1 in their first operand; what else they take are indices and sizes."""

SUMS = _names(
    """
    add add_ sub sub_ rsub cat stack where maximum minimum index_add index_add_ index_put index_put_ scatter
    scatter_ scatter_add scatter_add_ copy_ copy slice_scatter select_scatter masked_scatter index_copy
    index_copy_ masked_fill masked_fill_ fill_ clamp clamp_ clamp_min clamp_min_ clamp_max constant_pad_nd
    """
)
"""Operators whose operands must have one exponent. A number among them other than 0 and infinity makes it 0."""

WITH_NUMBERS = {
    **dict.fromkeys(_names("add add_ sub sub_ rsub where masked_fill masked_fill_ fill_ eq ne lt le gt ge"), 1),
    **dict.fromkeys(_names("clamp clamp_ clamp_min clamp_min_ clamp_max"), 1),
    "constant_pad_nd": 2,
    "scatter": 3,
    "scatter_": 3,
}
"""Those among them, and comparisons, that take numbers: the first argument that is no dimension but such a number."""

PRODUCTS = _names(
    """
    mul mul_ mm bmm dot mv _grouped_mm outer
    """
)
"""Operators that add the exponents of their first two operands."""

PRODUCTS_WITH_SUM = _names(
    """
    addmm addmm_ baddbmm addbmm addmv addcmul addcmul_
    """
)
"""Operators that add the product of two operands to a first one."""

ZEROS = _names(
    """
    zeros zeros_like new_zeros empty empty_like new_empty empty_strided new_empty_strided empty_permuted zero_
    """
)
"""Operators that make zeros, or memory that will be written before it is read."""

FILLS = _names(
    """
    full full_like new_full ones_like new_ones rand_like randn_like scalar_tensor
    """
)
"""Operators that fill memory with a number, or with random ones."""

ATTENTION = _names(
    """
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
    _scaled_dot_product_fused_attention_overrideable _scaled_dot_product_attention_math attention
    """
)
"""Fused attention: of torch, and of this package."""

COMPARISONS = _names(
    """
    eq ne lt le gt ge argmax argmin isinf isnan isfinite sign any all
    """
)
"""Operators whose result does not depend on a common factor of their operands."""

SCORES = _names(
    """
    add sub mul div where masked_fill clone _to_copy amax max maximum cat
    """
)
"""Operators between a product of queries and keys and its softmax; in place, too."""
