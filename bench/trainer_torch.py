"""The models of `halfstep train lm` and `train mnist` as PyTorch modules, with the same batches.

bench/trainer.py measures them, and tests/python/docs/test_trainer_torch.py compares their losses.
"""

import dataclasses
import os

import numpy
import torch

nn, functional = torch.nn, torch.nn.functional

# ---- What a run of the trainer is a function of --------------------------------------------------


def hash_counters(seed, a, b, c):
    """Hashes counters, as tools/trainer/products/rows.c does. Any of them may be an array."""
    step = 0x9E3779B97F4A7C15

    def mix(x):
        x = (x ^ x >> numpy.uint64(30)) * numpy.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ x >> numpy.uint64(27)) * numpy.uint64(0x94D049BB133111EB)
        return x ^ x >> numpy.uint64(31)

    with numpy.errstate(over="ignore"):
        h = mix(numpy.array([(seed + step) % 2**64], dtype=numpy.uint64))
        for counter in (a, b, c):
            h = mix((h ^ numpy.asarray(counter, dtype=numpy.uint64)) + numpy.uint64(step))
    return h


def split(text):
    """Returns the training and the validation part of a text (data_split in
    tools/trainer/data/data.c)."""
    first = len(text) - len(text) // 10
    return text[:first], text[first:]


def windows(part, seed, step, batch, context):
    """Returns the sequences of a step of `train lm`, context + 1 bytes each (data_window in
    tools/trainer/data/data.c). `part` is an array of bytes."""
    starts = hash_counters(seed, step, 0, numpy.arange(batch)) % numpy.uint64(len(part) - context)
    return part[starts.astype(numpy.int64)[:, None] + numpy.arange(context + 1)]


def evaluation_windows(part, count, context):
    """Returns the sequences of a validation of `train lm` (data_eval_window in
    tools/trainer/data/data.c): at most `count` of those that fit side by side."""
    last, count = len(part) - context - 1, max(1, min(count, len(part) // (context + 1)))
    starts = [int(last * i / (count - 1)) for i in range(count)] if count > 1 else [last // 2]
    return part[numpy.array(starts)[:, None] + numpy.arange(context + 1)]


def image_order(seed, epoch, n):
    """Returns the order of the images in an epoch of `train mnist` (shuffle in
    tools/trainer/mnist/mnist.c)."""
    order = list(range(n))
    i = numpy.arange(n, dtype=numpy.uint64)
    other = (hash_counters(seed, epoch, i, 0x6D6E697374) % (i + numpy.uint64(1))).tolist()
    for k in range(n - 1, 0, -1):
        order[k], order[other[k]] = order[other[k]], order[k]
    return order


# ---- The language model --------------------------------------------------------------------------


@dataclasses.dataclass
class Shape:
    """What --width, --depth, --heads, --context and --batch say."""

    width: int = 128
    depth: int = 4
    heads: int = 4
    context: int = 128
    batch: int = 16
    vocab: int = 256
    eps: float = 1e-5
    theta: float = 10000.0

    @property
    def intermediate(self):
        return ((8 * self.width + 2) // 3 + 31) // 32 * 32

    @property
    def matrices(self):
        """Elements of the matrices that a token is multiplied with: all but the embedding and the
        norms."""
        return (
            self.depth * (4 * self.width**2 + 3 * self.width * self.intermediate)
            + self.vocab * self.width
        )

    @property
    def params(self):
        return self.matrices + self.vocab * self.width + (2 * self.depth + 1) * self.width

    @property
    def flop(self):
        """Returns the operations of a token of training: two for each weight and pair of positions
        forward, twice that backward. Attention sees half of the square."""
        return 6 * self.matrices + 6 * self.depth * self.width * (self.context + 1)


class Attention(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.heads = shape.heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(shape.width, shape.width, bias=False) for _ in range(4)
        )

    def forward(self, x, cosine, sine):
        q, k, v = (
            p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (self.rotated(z, cosine, sine) for z in (q, k))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))

    @staticmethod
    def rotated(x, cosine, sine):
        """Positions in the half-split layout: element i of a head turns with element i + half."""
        a, b = x.to(cosine.dtype).chunk(2, -1)
        return torch.cat((a * cosine - b * sine, b * cosine + a * sine), -1).to(x.dtype)


class Mlp(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.gate_proj, self.up_proj = (
            nn.Linear(shape.width, shape.intermediate, bias=False) for _ in range(2)
        )
        self.down_proj = nn.Linear(shape.intermediate, shape.width, bias=False)

    def forward(self, x):
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.width, eps=shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.width, eps=shape.eps)
        self.mlp = Mlp(shape)

    def forward(self, x, cosine, sine):
        x = x + self.self_attn(self.input_layernorm(x), cosine, sine)
        return x + self.mlp(self.post_attention_layernorm(x))


def rotation_tables(shape):
    """Cosines and sines of the angles by position; these, and the loss, stay in fp32 where a model
    is converted."""
    half = shape.width // shape.heads // 2
    frequency = shape.theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(shape.context, dtype=torch.float64)[:, None] * frequency
    return angle.cos().float(), angle.sin().float()


class Llama(nn.Module):
    """Names as in the checkpoints of `train lm`."""

    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(shape.vocab, shape.width)
        self.model.layers = nn.ModuleList([Layer(shape) for _ in range(shape.depth)])
        self.model.norm = nn.RMSNorm(shape.width, eps=shape.eps)
        self.lm_head = nn.Linear(shape.width, shape.vocab, bias=False)
        self.rotation = rotation_tables(shape)

    def forward(self, tokens):
        """Returns the mean loss over sequences of context + 1 bytes."""
        cosine, sine = (table[: tokens.shape[1] - 1] for table in self.rotation)
        x = self.model.embed_tokens(tokens[:, :-1])
        for layer in self.model.layers:
            x = layer(x, cosine, sine)
        logits = self.lm_head(self.model.norm(x))
        return functional.cross_entropy(
            logits.to(cosine.dtype).flatten(0, 1), tokens[:, 1:].flatten()
        )


class Text:
    """The batches of `train lm` with this seed, tensors of int64."""

    def __init__(self, path, shape, seed):
        with open(path, "rb") as file:
            self.part, self.rest = split(numpy.frombuffer(file.read(), dtype=numpy.uint8))
        self.shape, self.seed = shape, seed

    def batch(self, step):
        return (
            torch.from_numpy(
                windows(self.part, self.seed, step, self.shape.batch, self.shape.context).astype(
                    numpy.int64
                )
            ),
        )

    def evaluation(self, batches):
        """Returns the validation batches of --eval-batches."""
        tokens = evaluation_windows(
            self.rest, batches * self.shape.batch, self.shape.context
        ).astype(numpy.int64)
        return [
            (torch.from_numpy(tokens[i : i + self.shape.batch]),)
            for i in range(0, len(tokens), self.shape.batch)
        ]


# ---- The network for digits ----------------------------------------------------------------------


class Digits(nn.Module):
    """Of images of 28 x 28, the only size here; the loss comes with the batch."""

    FLOP = (
        6 * (24 * 24 * 25 * 20 + 8 * 8 * 25 * 20 * 50 + 800 * 500 + 500 * 10)
        - 2 * 24 * 24 * 25 * 20
    )

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 20, 5), nn.Conv2d(20, 50, 5)
        self.fc1, self.fc2 = nn.Linear(800, 500), nn.Linear(500, 10)

    def forward(self, pixels, labels):
        x = ((pixels.float() / 255 - 0.1307) / 0.3081).to(self.conv1.weight.dtype)
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        x = self.fc2(functional.relu(self.fc1(x.flatten(1))))
        return functional.cross_entropy(x.to(torch.promote_types(x.dtype, torch.float32)), labels)

    @torch.no_grad()
    def initialize(self, seed):
        """Sets the first weights of `train mnist` (cnn_init_tensor in
        tools/trainer/models/cnn_shape.c)."""
        for i, (name, p) in enumerate(self.named_parameters()):
            inputs = self.get_submodule(name.split(".")[0]).weight[0].numel()
            hashes = hash_counters(seed, i, numpy.arange(p.numel()), 0x636E6E) >> numpy.uint64(11)
            values = (2 * (hashes.astype(numpy.float64) * 2.0**-53) - 1) / numpy.sqrt(inputs)
            p.copy_(torch.from_numpy(values.astype(numpy.float32)).view_as(p))


class Images:
    """The batches of `train mnist` with this seed from a folder that write_images() made. Orders
    are made beforehand, for so many epochs, and then come again."""

    def __init__(self, folder, batch, seed, epochs=4, part="train"):
        def read(name, header):
            with open(os.path.join(folder, name), "rb") as file:
                return numpy.frombuffer(file.read(), dtype=numpy.uint8, offset=header)

        self.labels = torch.from_numpy(read(f"{part}-labels-idx1-ubyte", 8).astype(numpy.int64))
        self.pixels = torch.from_numpy(read(f"{part}-images-idx3-ubyte", 16).copy()).view(
            -1, 1, 28, 28
        )
        self.size, self.steps = batch, -(-len(self.labels) // batch)
        self.orders = [
            torch.tensor(image_order(seed, epoch, len(self.labels))) for epoch in range(epochs)
        ]

    def batch(self, step):
        epoch, number = divmod(step, self.steps)
        some = self.orders[epoch % len(self.orders)][number * self.size : (number + 1) * self.size]
        return self.pixels[some], self.labels[some]

    def whole(self):
        return self.pixels, self.labels


def write_images(folder, train, test):
    """Writes the four files of MNIST with ten blots under noise. Some steps learn them, but one
    label of ten is wrong."""
    random = numpy.random.default_rng(1)
    blots = numpy.kron(random.integers(0, 256, (10, 7, 7)), numpy.ones((4, 4)))
    for name, n in (("train", train), ("t10k", test)):
        labels = random.integers(0, 10, n)
        pixels = (0.4 * blots[labels] + 0.6 * random.integers(0, 256, (n, 28, 28))).astype(
            numpy.uint8
        )
        labels = numpy.where(random.random(n) < 0.1, random.integers(0, 10, n), labels)
        with open(os.path.join(folder, f"{name}-images-idx3-ubyte"), "wb") as file:
            file.write(numpy.array([2051, n, 28, 28], dtype=">u4").tobytes() + pixels.tobytes())
        with open(os.path.join(folder, f"{name}-labels-idx1-ubyte"), "wb") as file:
            file.write(
                numpy.array([2049, n], dtype=">u4").tobytes() + labels.astype(numpy.uint8).tobytes()
            )


# ---- The optimizer -------------------------------------------------------------------------------


def groups(model, weight_decay, all_of_them=False):
    """Matrices decay, and nothing else, unless it is all of them, as in `train mnist`."""
    parts = {True: [], False: []}
    for p in model.parameters():
        parts[all_of_them or p.ndim > 1].append(p)
    return [
        {"params": part, "weight_decay": weight_decay if decays else 0.0}
        for decays, part in parts.items()
        if part
    ]
