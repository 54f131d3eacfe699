"""What attention is asked for beside its tensors, and what of it an axis does not have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from shoal.errors import UsageError
from shoal.parallel.sequence.context import SequenceContext
from shoal.parallel.sequence.documents import Documents

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of row, head, query and key: True where it may attend
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # of a score, row, head, query and key


@dataclass(frozen=True)
class AttentionOptions:
    """The options of ``shoal.attention``, of the heads that are computed here."""

    is_causal: bool
    mask: Tensor | None
    documents: Documents | Tensor | None
    window: int | None
    softcap: float | None
    score_mod: ScoreMod | None
    block_mask: BlockMask | MaskMod | None
    scale: float | None
    dropout_p: float
    sinks: Tensor | None = None

    @property
    def is_flexible(self) -> bool:
        """True if scores or masks are given by functions, as torch's flex attention takes them."""
        return self.score_mod is not None or self.block_mask is not None

    @property
    def are_torchs(self) -> bool:
        """True if torch's ``scaled_dot_product_attention`` has all of them."""
        own = (self.documents, self.window, self.softcap, self.sinks)
        return not self.is_flexible and all(value is None for value in own)

    def named(self) -> list[str]:
        """The names of those that say which scores count, and how."""
        given = {
            "is_causal": self.is_causal or None,
            "mask": self.mask,
            "documents": self.documents,
            "window": self.window,
            "softcap": self.softcap,
            "sinks": self.sinks,
        }
        return [name for name, value in given.items() if value is not None]


def check_options(options: AttentionOptions, context: SequenceContext) -> None:
    """Raises: UsageError: what holds on every rank or on none, so that all raise, and before memory is taken."""
    over = f"over sp={context.sp_size}, cp={context.cp_size}"
    if options.dropout_p:
        where = over if context.size > 1 else f"with {', '.join(options.named()) or 'score_mod or block_mask'}"
        raise UsageError(
            f"attention {where} was asked for dropout of {options.dropout_p}"
            + (": ranks do not draw what one rank would draw" if context.size > 1 else ""),
            do="set the model's attention dropout to 0; dropout after the output projection works.",
            code="sequence-dropout",
        )
    if options.is_flexible:
        name = "score_mod" if options.score_mod is not None else "block_mask"
        if context.cp_size > 1:
            raise UsageError(
                f"attention {over} was given a {name}: ring attention merges tiles that its kernels compute without",
                do="use sp alone for it (as many ranks as heads); over cp, is_causal, documents, window and softcap.",
                code="sequence-flex",
            )
        if options.named():
            raise UsageError(
                f"attention was given a {name} beside {', '.join(options.named())}",
                do="express everything in score_mod and block_mask, as for torch's flex_attention.",
                code="sequence-flex",
            )
    for name, value in (("window", options.window), ("softcap", options.softcap)):
        if value is not None and value <= 0:
            raise UsageError(
                f"attention was given {name}={value}",
                do=f"give a {name} above 0, or None for none.",
                code="sequence-shape",
            )
    beside = [name for name in options.named() if name in ("is_causal", "documents", "window")]
    if options.mask is not None and (context.cp_size > 1 or beside):
        raise UsageError(
            f"attention {over} was given a mask of shape {tuple(options.mask.shape)}"
            + (f" beside {', '.join(beside)}" if beside else ": ring attention keeps no scores of all keys"),
            do="use is_causal=True, documents for packed or padded rows, and window; or, over sp alone, a mask of the"
            " whole sequence which says all.",
            code="sequence-mask",
        )


def check_shapes(
    query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, context: SequenceContext
) -> None:
    """Raises: UsageError: as :func:`check_options`."""
    over = f"over sp={context.sp_size}, cp={context.cp_size}"
    shape, keys, values = tuple(query.shape), tuple(key.shape), tuple(value.shape)
    if not (shape[0] == keys[0] and shape[2:] == keys[2:] and keys[:3] == values[:3]):
        raise UsageError(
            f"attention {over} was given a query of shape {shape}, keys of {keys} and values of {values}",
            do="give all three the same rows and positions, [B, heads, L, E]: a cache of keys works on one rank only.",
            code="sequence-shape",
        )
    if len({query.dtype, key.dtype, value.dtype}) > 1:
        raise UsageError(
            f"attention {over} was given {query.dtype}, {key.dtype} and {value.dtype}",
            do="cast query, key and value to one dtype.",
            code="sequence-shape",
        )
    if options.sinks is not None and options.sinks.shape != shape[1:2]:
        raise UsageError(
            f"attention {over} was given sinks of shape {tuple(options.sinks.shape)} for {shape[1]} heads",
            do="give one value for each head of the query.",
            code="sequence-shape",
        )
    length = context.whole_length(shape[2], "attention's query")
    if options.mask is not None and options.mask.shape[-2:] != (length, length):
        raise UsageError(
            f"attention {over} was given a mask of shape {tuple(options.mask.shape)}",
            do=f"give a mask of the whole sequence, [.., {length}, {length}], which says all, or is_causal alone.",
            code="sequence-mask",
        )
    block_mask = options.block_mask
    if block_mask is not None and not callable(block_mask) and tuple(block_mask.shape[-2:]) != (length, length):
        raise UsageError(
            f"attention {over} was given a BlockMask of shape {tuple(block_mask.shape)}",
            do=f"make it for the whole sequence: create_block_mask(mask_mod, B, H, {length}, {length}).",
            code="sequence-flex",
        )


def check_documents(options: AttentionOptions, rows: int, length: int) -> None:
    """Raises: UsageError: documents of other rows or positions."""
    documents = options.documents
    if isinstance(documents, Documents) and (documents.length != length or len(documents.begins) not in (1, rows)):
        raise UsageError(
            f"documents of {len(documents.begins)} rows of {documents.length} positions, for {rows} rows of {length}",
            do="make the documents of the whole batch's rows, not of this rank's positions.",
            code="sequence-documents",
        )
