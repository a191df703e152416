"""The text models of the open list besides the GPT: a Llama, a recurrent network, a mixture of experts."""

import torch
from models import Attention
from torch import Tensor, nn

LENGTH = 32


class RotaryAttention(nn.Module):
    """Causal attention with rotary positions, whose two keys and values serve two heads each."""

    cos: Tensor
    sin: Tensor

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.q_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(width, width // 2, bias=False) for _ in range(2))
        self.logits = nn.Identity()
        angle = torch.outer(torch.arange(LENGTH), 100.0 ** (-torch.arange(0, self.size, 2) / self.size)).repeat(1, 2)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def _turned(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        length = x.shape[-2]
        return x * self.cos[:length] + torch.cat([-second, first], -1) * self.sin[:length]

    def forward(self, x: Tensor) -> Tensor:
        """Return the attended sequence, shape (batch, length, width)."""
        batch, length, width = x.shape
        q, k, v = (
            p(x).view(batch, length, -1, self.size).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = self._turned(k).repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        logits = self.logits(self._turned(q) @ k.transpose(-1, -2) / self.size**0.5)
        y = (logits + torch.full((length, length), -1e4).triu(1)).softmax(-1) @ v
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, width))


class GatedMlp(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.act, self.down_proj = nn.SiLU(), nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the transformed sequence."""
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class LlamaBlock(nn.Module):
    """Attention and MLP, each behind an RMS norm and beside a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.RMSNorm(width, 1e-5), RotaryAttention(width, 4)
        self.norm2, self.mlp = nn.RMSNorm(width, 1e-5), GatedMlp(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sequence after both residuals."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """Embedding, three blocks, RMS norm, a head of its own; no biases."""

    def __init__(self, vocabulary: int = 64, width: int = 32) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width) for _ in range(3))
        self.norm_f, self.head = nn.RMSNorm(width, 1e-5), nn.Linear(width, vocabulary, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, 0.0, 0.08)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, shape (batch, length, vocabulary)."""
        x = self.tok(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm_f(x))


class RecurrentLayer(nn.Module):
    """An LSTM, then a norm, a projection and an activation beside a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rnn = nn.LSTM(width, width, batch_first=True)
        self.norm, self.proj = nn.LayerNorm(width), nn.Linear(width, width)
        self.act, self.drop = nn.GELU(), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sequence after the residual."""
        y, _ = self.rnn(x)
        return x + self.drop(self.act(self.proj(self.norm(y))))


class Recurrent(nn.Module):
    """Embedding, two recurrent layers, a head."""

    def __init__(self, vocabulary: int = 64, width: int = 48) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(RecurrentLayer(width) for _ in range(2))
        self.norm_f, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)
        nn.init.normal_(self.tok.weight, 0.0, 0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, shape (batch, length, vocabulary)."""
        x = self.tok(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm_f(x))


class Expert(nn.Module):
    """Two linear layers around a GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the transformed tokens, shape (tokens, width)."""
        return self.fc2(self.act(self.fc1(x)))


class Experts(nn.Module):
    """Four experts of which each token takes two, balanced by a bias that follows the load (arXiv 2408.15664)."""

    bias: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router, self.gates = nn.Linear(width, 4, bias=False), nn.Identity()
        self.experts = nn.ModuleList(Expert(width) for _ in range(4))
        self.register_buffer("bias", torch.zeros(4))
        self.balance, self.capacity = 0.01, 2.0

    def forward(self, x: Tensor) -> Tensor:
        """Return the mixture of two experts a token; what an expert's capacity does not hold is dropped."""
        tokens = x.flatten(0, -2)
        scores = self.router(tokens).sigmoid()
        chosen = (scores.detach() + self.bias).topk(2, -1).indices
        gates = scores.gather(-1, chosen)
        gates = self.gates(gates / gates.sum(-1, keepdim=True))
        room, mixed, load = int(self.capacity * len(tokens) / 2), torch.zeros_like(tokens), []
        for i, expert in enumerate(self.experts):
            rows, place = (chosen == i).nonzero(as_tuple=True)
            load.append(float(len(rows)))
            rows, place = rows[:room], place[:room]
            mixed = mixed.index_add(0, rows, (expert(tokens[rows]) * gates[rows, place, None]).to(mixed.dtype))
        if self.training:
            filled = torch.tensor(load)
            self.bias += self.balance * (filled.mean() - filled).sign()
        return mixed.view_as(x)


class MoeBlock(nn.Module):
    """Attention and experts, each behind a norm and beside a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln1, self.attn = nn.LayerNorm(width), Attention(width, 4)
        self.ln2, self.moe = nn.LayerNorm(width), Experts(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sequence after both residuals."""
        x = x + self.attn(self.ln1(x))
        return x + self.moe(self.ln2(x))


class Moe(nn.Module):
    """Embeddings, two blocks with experts, a head."""

    def __init__(self, vocabulary: int = 64, width: int = 32) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocabulary, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(MoeBlock(width) for _ in range(2))
        self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, 0.0, 0.08)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, shape (batch, length, vocabulary)."""
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))
