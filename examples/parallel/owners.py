"""Optimizers of whole matrices: each matrix is worked on at one rank, its owner.

Parameters are sharded as in `fully_sharded.py`. All gradients go to their owners in one all-to-all,
and the steps come back in another; the statistics of a matrix stay with its owner.
`torch.optim.Muon` does so by itself. Shampoo (Gupta et al. 2018) and SOAP (Vyas et al. 2024) are
written here in one process's words, with `weft.nn.Owners`.

    weft run -n 4 examples/parallel/owners.py
    weft run -n 4 examples/parallel/owners.py soap
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

import plain
import weft
from weft import P


def root(matrix: Tensor) -> Tensor:
    """The inverse fourth root."""
    values, vectors = torch.linalg.eigh(matrix + 1e-3 * torch.eye(len(matrix)))
    return vectors * values.clamp(min=1e-3) ** -0.25 @ vectors.T


def shampoo(grad: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, ...]:
    left, right = left + grad @ grad.T, right + grad.T @ grad
    return root(left) @ grad @ root(right), left, right


def soap(
    grad: Tensor, left: Tensor, right: Tensor, basis: Tensor, other: Tensor, size: Tensor
) -> tuple[Tensor, ...]:
    """A step of RMSprop in the basis of Shampoo's statistics, which one power iteration updates."""
    left, right = left + grad @ grad.T, right + grad.T @ grad
    start = [one if one.any() else torch.eye(len(one)) for one in (basis, other)]
    basis, other = (torch.linalg.qr(one @ was)[0] for one, was in zip((left, right), start))
    turned = basis.T @ grad @ other
    size = 0.9 * size + 0.1 * turned.square()
    return basis @ (turned / (size.sqrt() + 1e-2)) @ other.T, left, right, basis, other, size


class Whitening(torch.optim.Optimizer):
    """One of the two for matrices; the rest is for AdamW."""

    def __init__(self, model: nn.Module, kind: str) -> None:
        super().__init__(model.parameters(), {})
        self.matrices = [one for one in model.parameters() if one.dim() == 2]
        self.rest = torch.optim.AdamW([one for one in model.parameters() if one.dim() != 2], 1e-2)
        self.owners = weft.nn.Owners(self.matrices)
        self.update, self.rate = {"shampoo": (shampoo, 5e-2), "soap": (soap, 1e-2)}[kind]
        m, n = ([(one.shape[side],) * 2 for one in self.matrices] for side in (0, 1))
        shapes = [m, n] if kind == "shampoo" else [m, n, m, n, [one.shape for one in self.matrices]]
        self.held: Any = [
            [self.owners.zeros(at, shape) for at, shape in enumerate(some)] for some in shapes]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        grads: Any = [one.grad for one in self.matrices]
        steps, *self.held = self.owners.map(
            self.update, grads, *self.held, num_results=1 + len(self.held))
        for one, step in zip(self.matrices, steps):
            one.sub_(step, alpha=self.rate)
        self.rest.step()


def sharded(num_ranks: int, kind: str = "shampoo") -> list[float]:
    mesh = weft.init_mesh({"fsdp": num_ranks})
    model = weft.distribute_module(plain.make(), mesh, shardings={"*": P("fsdp")})
    return plain.train(
        model, lambda ids: weft.distribute_tensor(ids, mesh, P("fsdp")), how(kind))


def how(kind: str = "shampoo") -> Any:
    return lambda model: Whitening(model, kind)


if __name__ == "__main__":
    chosen = (*sys.argv[1:2], "shampoo")[0]
    plain.beside(sharded(plain.num_ranks(), chosen), plain.alone(optimizer_of=how(chosen)))
