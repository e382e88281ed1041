/* Trains a small network to predict the next byte of a text, by examples/halfstep.hpp. The weights are BF16 with error
 * codes, and the states have 8 bits. It saves at the end; started again with more steps, it goes on from there with the
 * bits of a run that never stopped. examples/halfstep.rs is the same program in Rust, and takes over its checkpoints.
 *
 *   c++ -std=c++17 -ffp-contract=off train.cpp -lhalfstep_io -lhalfstep
 *   ./a.out TEXT DIRECTORY STEPS */
#include "halfstep.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iterator>

constexpr std::size_t context = 4, width = 32, inputs = context * width, hidden = 64, bytes = 128, batch = 16;

struct Parameter {
    std::string name;
    std::vector<int64_t> sizes;
    std::vector<uint16_t> stored{}; /* BF16, as halfstep steps it */
    std::vector<float> values{}, gradient{};
};

/* Returns a random number, and advances the state. */
static uint64_t draw(uint64_t &state)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return state >> 40;
}

class Trainer
{
  public:
    explicit Trainer(std::string text) : text_(std::move(text))
    {
        int32_t matrices = optimizer_.add_group("adamw/bf16-ecc8/int8");
        int32_t biases = optimizer_.add_group("adamw/bf16-ecc8/f32");
        optimizer_.set(HALFSTEP_ALL_GROUPS, "lr", 0.005);
        optimizer_.set(HALFSTEP_ALL_GROUPS, "clip_norm", 1.0);
        optimizer_.set(biases, "weight_decay", 0);
        uint64_t random = 1;
        for (Parameter &p : parameters_) optimizer_.add_tensor(p.sizes.size() > 1 ? matrices : biases, p.name, p.sizes);
        optimizer_.allocate_states();
        for (std::size_t i = 0; i < parameters_.size(); i++) {
            Parameter &p = parameters_[i];
            std::size_t n = 1;
            for (int64_t size : p.sizes) n *= static_cast<std::size_t>(size);
            p.stored.resize(n);
            p.gradient.resize(n);
            for (std::size_t k = 0; k < n; k++)
                p.values.push_back((static_cast<float>(draw(random)) * 0x1p-23f - 1.0f) * 0.1f);
            weights_.push_back(p.stored.data());
            gradients_.push_back(p.gradient.data());
            optimizer_.write(static_cast<int32_t>(i), HALFSTEP_SLOT_WEIGHT, weights_[i], p.values);
        }
    }

    /* Loads the last checkpoint, if there is one, and trains from its step on. */
    void run(const std::string &directory, uint64_t steps)
    {
        uint64_t first = optimizer_.load(directory, weights_).value_or(0);
        decode();
        for (uint64_t step = first; step < steps; step++) {
            uint64_t random = step; /* the batch follows from the step, so that a resumed run has the right data */
            for (Parameter &p : parameters_) std::fill(p.gradient.begin(), p.gradient.end(), 0.0f);
            for (std::size_t b = 0; b < batch; b++) predict(context + draw(random) % (text_.size() - context), true);
            if (!optimizer_.step(weights_, gradients_)) std::fprintf(stderr, "%s\n", optimizer_.detail().c_str());
            decode();
        }
        std::string note = optimizer_.save(directory, steps, weights_);
        if (!note.empty()) std::fprintf(stderr, "%s\n", note.c_str());
    }

    /* Returns the loss for each byte of the text, in nats. */
    double loss()
    {
        double sum = 0;
        for (std::size_t at = context; at < text_.size(); at++) sum += predict(at, false);
        return sum / static_cast<double>(text_.size() - context);
    }

    const halfstep::Optimizer &optimizer() const { return optimizer_; }

  private:
    void decode()
    {
        for (std::size_t i = 0; i < parameters_.size(); i++)
            optimizer_.read(static_cast<int32_t>(i), HALFSTEP_SLOT_WEIGHT, weights_[i], parameters_[i].values);
    }

    std::size_t byte(std::size_t at) const { return static_cast<unsigned char>(text_[at]) % bytes; }

    /* Returns the loss of the byte at a place. Adds to the gradients if `learn` is set. */
    double predict(std::size_t at, bool learn)
    {
        auto &[embedding, first, bias, last] = parameters_;
        float x[inputs], h[hidden], p[bytes], below[inputs] = {}, back[hidden] = {}, total = 0;
        for (std::size_t c = 0; c < context; c++)
            std::copy_n(&embedding.values[byte(at - 1 - c) * width], width, x + c * width);
        for (std::size_t j = 0; j < hidden; j++) {
            float sum = bias.values[j];
            for (std::size_t i = 0; i < inputs; i++) sum += first.values[j * inputs + i] * x[i];
            h[j] = std::max(sum, 0.0f);
        }
        for (std::size_t o = 0; o < bytes; o++) {
            p[o] = 0;
            for (std::size_t j = 0; j < hidden; j++) p[o] += last.values[o * hidden + j] * h[j];
        }
        float largest = *std::max_element(p, p + bytes);
        for (float &value : p) total += value = std::exp(value - largest);
        std::size_t target = byte(at);
        if (!learn) return -std::log(static_cast<double>(p[target] / total));
        for (std::size_t o = 0; o < bytes; o++) {
            float error = (p[o] / total - (o == target ? 1.0f : 0.0f)) / batch;
            for (std::size_t j = 0; j < hidden; j++) {
                last.gradient[o * hidden + j] += error * h[j];
                back[j] += error * last.values[o * hidden + j];
            }
        }
        for (std::size_t j = 0; j < hidden; j++) {
            if (h[j] == 0.0f) continue;
            bias.gradient[j] += back[j];
            for (std::size_t i = 0; i < inputs; i++) {
                first.gradient[j * inputs + i] += back[j] * x[i];
                below[i] += back[j] * first.values[j * inputs + i];
            }
        }
        for (std::size_t c = 0; c < context; c++)
            for (std::size_t i = 0; i < width; i++)
                embedding.gradient[byte(at - 1 - c) * width + i] += below[c * width + i];
        return -std::log(static_cast<double>(p[target] / total));
    }

    std::string text_;
    halfstep::Optimizer optimizer_{1}; /* the seed */
    std::array<Parameter, 4> parameters_{{{"embedding.weight", {bytes, width}},
                                          {"hidden.weight", {hidden, inputs}},
                                          {"hidden.bias", {hidden}},
                                          {"output.weight", {bytes, hidden}}}};
    std::vector<void *> weights_;
    std::vector<const void *> gradients_;
};

/* Returns the loss of a model that knows only how often each byte comes. */
static double entropy(const std::string &text)
{
    double counts[256] = {}, sum = 0, n = static_cast<double>(text.size());
    for (unsigned char c : text) counts[c]++;
    for (double count : counts) sum -= count > 0 ? count / n * std::log(count / n) : 0;
    return sum;
}

int main(int argc, char **argv)
{
    try {
        if (argc != 4) throw std::invalid_argument("usage: train TEXT DIRECTORY STEPS");
        std::ifstream file(argv[1], std::ios::binary);
        std::string text{std::istreambuf_iterator<char>(file), {}};
        if (text.size() <= context) throw std::invalid_argument(std::string(argv[1]) + ": no text to learn");
        Trainer trainer(text);
        trainer.run(argv[2], std::stoull(argv[3]));
        halfstep::Memory memory = trainer.optimizer().memory();
        double loss = trainer.loss(), alone = entropy(text);
        std::printf("loss %.3f, of single bytes %.3f; states take %llu bytes, in fp32 %llu\n", loss, alone,
                    static_cast<unsigned long long>(memory.states),
                    static_cast<unsigned long long>(memory.weights * 4));
        return loss < alone ? 0 : 1;
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
