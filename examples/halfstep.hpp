/* halfstep.hpp - halfstep.h for C++17 and later. A handle frees itself and can be moved, failures are exceptions, and
 * lengths are checked. Copy this file into your program and change it. examples/train.cpp uses it.
 *
 *   halfstep::Optimizer optimizer;
 *   int32_t group = optimizer.add_group("adamw/bf16-sr/int8");
 *   optimizer.set(group, "lr", 3e-4);
 *   optimizer.add_tensor(group, "layer.weight", {1024, 4096}, "bf16");
 *   optimizer.allocate_states();
 *   if (!optimizer.step(weights, gradients)) std::cerr << optimizer.detail() << "\n";   // nothing changed
 *
 * halfstep.h explains every call. optimizer.get() is the handle, for calls that are not here. Programs that use save()
 * or load() link halfstep_io too. */
#ifndef HALFSTEP_HPP
#define HALFSTEP_HPP

#include <halfstep.h>
#include <halfstep_io.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace halfstep
{

/* Reports a call that failed: what() is halfstep's text, and code() is a code of halfstep.h. */
class Error : public std::runtime_error
{
  public:
    Error(int code, const std::string &text)
        : std::runtime_error(text.empty() ? halfstep_strerror(code) : halfstep_strerror(code) + (": " + text)),
          code_(code)
    {
    }
    int code() const noexcept { return code_; }

  private:
    int code_;
};

/* Refers to contiguous elements of somebody else, as std::span of C++20 does. */
template <class T> class Span
{
  public:
    Span(T *data, std::size_t size) : data_(data), size_(size) {}
    template <class Container, class = decltype(static_cast<T *>(std::declval<Container &>().data()))>
    Span(Container &&container) : data_(container.data()), size_(container.size())
    {
    }
    T *data() const { return data_; }
    std::size_t size() const { return size_; }

  private:
    T *data_;
    std::size_t size_;
};
using Weights = Span<void *const>;         /* one pointer for each tensor */
using Gradients = Span<const void *const>; /* likewise; nullptr leaves a tensor alone */

struct Memory {
    uint64_t weights = 0, gradients = 0, weight_extras = 0, states = 0; /* bytes */
    int32_t fell_back = 0; /* tensors that are too small for the block format of their recipe */
};

class Optimizer
{
  public:
    explicit Optimizer(uint64_t seed = 0, const std::string &device = "cpu", int32_t threads = 0)
    {
        halfstep_options options{};
        options.struct_size = sizeof options;
        options.seed = seed;
        options.device = device.c_str();
        options.threads = threads;
        halfstep_optimizer *made = nullptr;
        check(halfstep_create(&options, &made));
        handle_.reset(made);
    }

    halfstep_optimizer *get() const { return handle_.get(); }
    std::string detail() const { return halfstep_error_detail(get()); }

    int32_t add_group(const std::string &recipe)
    {
        int32_t group;
        check(halfstep_add_group(get(), recipe.c_str(), &group));
        return group;
    }
    /* Set a hyper-parameter or a choice by name. group may be HALFSTEP_ALL_GROUPS. */
    void set(int32_t group, const std::string &name, double value)
    {
        check(halfstep_set_hyper(get(), group, name.c_str(), value));
    }
    void set(int32_t group, const std::string &choice, const std::string &value)
    {
        check(halfstep_set_choice(get(), group, choice.c_str(), value.c_str()));
    }

    /* Adds a whole tensor with the sizes of its dimensions, and returns its index. gradient: "f32", "bf16" or "f16". */
    int32_t add_tensor(int32_t group, const std::string &name, const std::vector<int64_t> &sizes,
                       const std::string &gradient = "f32")
    {
        halfstep_tensor tensor{};
        tensor.struct_size = sizeof tensor;
        tensor.group = group;
        tensor.name = name.c_str();
        tensor.ndim = static_cast<int32_t>(sizes.size());
        tensor.rows = sizes.empty() ? 1 : sizes[0];
        tensor.row_length = 1;
        for (std::size_t i = 1; i < sizes.size(); i++) tensor.row_length *= sizes[i];
        tensor.gradient = gradient.c_str();
        int32_t index;
        check(halfstep_add_tensor(get(), &tensor, &index));
        return index;
    }

    void allocate_states() { check(halfstep_allocate_states(get())); }
    Memory memory() const
    {
        Memory m;
        check(halfstep_memory(get(), &m.weights, &m.gradients, &m.weight_extras, &m.states, &m.fell_back));
        return m;
    }

    /* Makes one update of every tensor. Returns false, with nothing changed, if a gradient is not finite. */
    bool step(Weights weights, Gradients gradients)
    {
        count(weights.size(), halfstep_tensor_count(get()), "weights for tensors");
        count(gradients.size(), halfstep_tensor_count(get()), "gradients for tensors");
        int code = halfstep_step(get(), weights.data(), gradients.data());
        return code == HALFSTEP_NONFINITE ? false : (check(code), true);
    }

    /* Decode or encode a whole weight (HALFSTEP_SLOT_WEIGHT), gradient or state. data: the caller's buffer, nullptr for
     * a state. */
    void read(int32_t tensor, int32_t slot, const void *data, Span<float> values) const
    {
        check(halfstep_read_slot(get(), tensor, slot, data, 0, rows(tensor, slot, values.size()), values.data()));
    }
    void write(int32_t tensor, int32_t slot, void *data, Span<const float> values)
    {
        check(halfstep_write_slot(get(), tensor, slot, data, 0, rows(tensor, slot, values.size()), values.data()));
    }

    /* Saves optimizer and weights into a checkpoint directory, durably. Returns a note, or "". */
    std::string save(const std::string &directory, uint64_t step, Weights weights) const
    {
        halfstep_checkpoint_save *saving = nullptr;
        halfstep_save_options options{};
        options.struct_size = sizeof options;
        options.step = step;
        count(weights.size(), halfstep_tensor_count(get()), "weights for tensors");
        char text[512] = "";
        check(halfstep_begin_checkpoint(&saving, directory.c_str(), &options, text, sizeof text), text);
        halfstep_save_optimizer(saving, get(), weights.data(), nullptr, text, sizeof text);
        check(halfstep_commit_checkpoint(saving, text, sizeof text), text); /* also if the call before failed */
        return text;
    }
    /* Loads both from there and returns the step, or nothing if there is no checkpoint. */
    std::optional<uint64_t> load(const std::string &directory, Weights weights)
    {
        count(weights.size(), halfstep_tensor_count(get()), "weights for tensors");
        halfstep_checkpoint *opened = nullptr;
        char text[512] = "";
        int code = halfstep_open_checkpoint(&opened, directory.c_str(), nullptr, text, sizeof text);
        if (code == HALFSTEP_ERROR_NAME) return std::nullopt;
        check(code, text);
        std::unique_ptr<halfstep_checkpoint, Free> checkpoint(opened);
        check(halfstep_load_optimizer(opened, get(), weights.data(), nullptr, text, sizeof text), text);
        halfstep_checkpoint_info info{};
        info.struct_size = sizeof info;
        check(halfstep_get_checkpoint_info(opened, &info));
        return info.step;
    }

  private:
    struct Free {
        void operator()(halfstep_optimizer *handle) const { halfstep_destroy(handle); }
        void operator()(halfstep_checkpoint *checkpoint) const { halfstep_close_checkpoint(checkpoint); }
    };

    void check(int code) const
    {
        if (code != HALFSTEP_OK) throw Error(code, detail());
    }
    static void check(int code, const char *text)
    {
        if (code != HALFSTEP_OK) throw Error(code, text);
    }
    static void count(std::size_t given, int64_t wanted, const char *what)
    {
        if (given != static_cast<std::size_t>(wanted))
            throw Error(HALFSTEP_ERROR_ARGUMENT,
                        std::to_string(given) + " " + what + ", of which there are " + std::to_string(wanted));
    }
    int64_t rows(int32_t tensor, int32_t slot, std::size_t values) const
    {
        halfstep_slot_info info{};
        info.struct_size = sizeof info;
        check(halfstep_get_slot_info(get(), tensor, slot, &info));
        count(values, info.rows * info.columns, "values for elements");
        return info.rows;
    }

    std::unique_ptr<halfstep_optimizer, Free> handle_;
};

} // namespace halfstep
#endif
