/* A device of torch's kind PrivateUse1, for tests of what halfstep does with devices that it has no kernels for. It
 * stands in for AMD's, Apple's and Intel's GPUs, and is as unkind as they may be:
 *
 *   memory    lies at addresses that fault when the process touches them. Only what runs "on the device" reaches the
 *             same pages, at another address
 *   streams   do their work when somebody waits for it, and no sooner. Freed memory is overwritten before it is used again
 *   kernels   are those of the processor: each operator waits for the current stream, and its result arrives later
 *
 * tests/python/gpu/standin/__init__.py compiles and loads this file. */
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>
#include <vector>

namespace
{

constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 2;
constexpr size_t ROOM = size_t(4) << 30, PAGE = 4096;
constexpr int FREED = 0xA5;

std::recursive_mutex lock;
using Guard = std::lock_guard<std::recursive_mutex>;
bool single = false; // True: no stream beside the default one
thread_local int current_device = 0;
thread_local c10::StreamId current_stream[DEVICES];
int64_t counts[4]; // copies between pinned memory and the device: to the process, their bytes; to the device, the same

// ---- Streams ---------------------------------------------------------------------------------------------------------

struct Queue {
    std::deque<std::function<void()>> work;
    uint64_t done = 0, given = 0;

    void run(uint64_t until)
    {
        while (done < until) {
            auto next = std::move(work.front());
            work.pop_front();
            done++;
            next();
        }
    }
};

std::vector<std::unique_ptr<Queue>> queues[DEVICES];

Queue &queue(int device, c10::StreamId id)
{
    auto &of = queues[device];
    while (of.size() <= size_t(id)) of.push_back(std::make_unique<Queue>());
    return *of[id];
}

Queue &queue(c10::Stream s) { return queue(s.device_index(), s.id()); }

Queue &now(int device) { return queue(device, current_stream[device]); }

void submit(Queue &q, std::function<void()> work)
{
    q.work.push_back(std::move(work));
    q.given++;
}

struct Event {
    Queue *of = nullptr;
    uint64_t at = 0;
};

// ---- Memory ----------------------------------------------------------------------------------------------------------

char *shown, *real; // the same pages twice: addresses that fault, and addresses for the device

struct Block {
    size_t size;
    int device;
    std::vector<Event> readers; // of other streams than the default one
};

std::map<char *, Block> blocks;
std::multimap<size_t, char *> spare[DEVICES];
std::vector<std::pair<char *, Block>> leaving;
size_t used;

void open_memory()
{
    int file = memfd_create("standin", 0);
    TORCH_CHECK(file >= 0 && !ftruncate(file, ROOM));
    shown = static_cast<char *>(mmap(nullptr, ROOM, PROT_NONE, MAP_SHARED, file, 0));
    real = static_cast<char *>(mmap(nullptr, ROOM, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0));
    TORCH_CHECK(shown != MAP_FAILED && real != MAP_FAILED);
    close(file);
}

char *reach(const void *address)
{
    auto at = static_cast<const char *>(address);
    TORCH_CHECK(at >= shown && at < shown + ROOM, "this is no memory of the device");
    return real + (at - shown);
}

void forget(void *address)
{
    if (!address) return;
    Guard guard(lock);
    auto found = blocks.find(static_cast<char *>(address));
    auto [at, block] = *found;
    blocks.erase(found);
    leaving.emplace_back(at, block);
}

struct Memory final : c10::Allocator {
    c10::DataPtr allocate(size_t n) override
    {
        Guard guard(lock);
        for (size_t i = leaving.size(); i-- > 0;) {
            bool read = true;
            for (auto &event : leaving[i].second.readers) read &= event.of->done >= event.at;
            if (!read) continue;
            auto [at, block] = leaving[i];
            char *place = reach(at);
            size_t size = block.size;
            submit(queue(block.device, 0), [place, size] { memset(place, FREED, size); });
            spare[block.device].emplace(size, at);
            leaving.erase(leaving.begin() + i);
        }
        if (!n) return {nullptr, nullptr, &forget, c10::Device(KIND, current_device)};
        size_t size = (n + PAGE - 1) / PAGE * PAGE;
        auto &of = spare[current_device];
        auto found = of.find(size);
        char *at = shown + used;
        if (found != of.end()) {
            at = found->second;
            of.erase(found);
        } else {
            TORCH_CHECK(used + size <= ROOM, "the stand-in is out of memory");
            used += size;
        }
        blocks[at] = {size, current_device, {}};
        return {at, at, &forget, c10::Device(KIND, current_device)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &forget; }
    void copy_data(void *to, const void *from, size_t n) const override { memcpy(reach(to), reach(from), n); }
};

std::map<char *, size_t> pins;

bool is_pinned(const void *address)
{
    Guard guard(lock);
    auto at = static_cast<char *>(const_cast<void *>(address));
    auto found = pins.upper_bound(at);
    return found != pins.begin() && at < std::prev(found)->first + std::prev(found)->second;
}

void unpin(void *address)
{
    Guard guard(lock);
    pins.erase(static_cast<char *>(address));
    free(address);
}

struct Pinned final : at::HostAllocator {
    c10::DataPtr allocate(size_t n) override
    {
        Guard guard(lock);
        auto at = static_cast<char *>(aligned_alloc(PAGE, (n + PAGE) / PAGE * PAGE));
        memset(at, FREED, n);
        pins[at] = n + 1;
        return {at, at, &unpin, c10::Device(c10::kCPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
    void copy_data(void *to, const void *from, size_t n) const override { memcpy(to, from, n); }
    bool record_event(void *, void *, c10::Stream) override { return true; }
    void empty_cache() override {}
    at::HostStats get_stats() override { return {}; }
    void reset_accumulated_stats() override {}
    void reset_peak_stats() override {}
};

Memory memory;
Pinned pinned;

// ---- What torch asks of a device -------------------------------------------------------------------------------------

c10::Stream stream_of(int device, c10::StreamId id)
{
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(KIND, device), id);
}

struct Device final : c10::impl::DeviceGuardImplInterface {
    static constexpr c10::DeviceType static_type = KIND;
    Device() = default;
    explicit Device(c10::DeviceType) {}
    c10::DeviceType type() const override { return KIND; }
    c10::Device exchangeDevice(c10::Device d) const override
    {
        c10::Device before = getDevice();
        setDevice(d);
        return before;
    }
    c10::Device getDevice() const override { return {KIND, static_cast<c10::DeviceIndex>(current_device)}; }
    void setDevice(c10::Device d) const override { uncheckedSetDevice(d); }
    void uncheckedSetDevice(c10::Device d) const noexcept override
    {
        if (d.has_index()) current_device = d.index();
    }
    c10::Stream getStream(c10::Device d) const override { return stream_of(d.index(), current_stream[d.index()]); }
    c10::Stream getDefaultStream(c10::Device d) const override { return stream_of(d.index(), 0); }
    c10::Stream getNewStream(c10::Device d, int) const override
    {
        Guard guard(lock);
        int device = d.has_index() ? d.index() : current_device;
        queue(device, 0);
        return stream_of(device, single ? 0 : queues[device].size());
    }
    c10::Stream exchangeStream(c10::Stream s) const override
    {
        c10::Stream before = getStream(s.device());
        current_stream[s.device_index()] = s.id();
        return before;
    }
    c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
    void record(void **event, const c10::Stream &s, const c10::DeviceIndex, const c10::EventFlag) const override
    {
        Guard guard(lock);
        if (!*event) *event = new Event;
        *static_cast<Event *>(*event) = {&queue(s), queue(s).given};
    }
    void block(void *event, const c10::Stream &s) const override
    {
        Guard guard(lock);
        if (event) submit(queue(s), [e = *static_cast<Event *>(event)] { e.of->run(e.at); });
    }
    bool queryEvent(void *event) const override
    {
        Guard guard(lock);
        return !event || static_cast<Event *>(event)->of->done >= static_cast<Event *>(event)->at;
    }
    void synchronizeEvent(void *event) const override
    {
        Guard guard(lock);
        if (event) static_cast<Event *>(event)->of->run(static_cast<Event *>(event)->at);
    }
    void destroyEvent(void *event, const c10::DeviceIndex) const noexcept override
    {
        delete static_cast<Event *>(event);
    }
    bool queryStream(const c10::Stream &s) const override { return queue(s).done == queue(s).given; }
    void synchronizeStream(const c10::Stream &s) const override
    {
        Guard guard(lock);
        queue(s).run(queue(s).given);
    }
    void synchronizeDevice(const c10::DeviceIndex device) const override
    {
        Guard guard(lock);
        for (size_t i = 0; i < queues[device].size(); i++) queues[device][i]->run(queues[device][i]->given);
    }
    void recordDataPtrOnStream(const c10::DataPtr &data, const c10::Stream &s) const override
    {
        Guard guard(lock);
        auto found = blocks.find(static_cast<char *>(data.get_context()));
        if (found != blocks.end()) found->second.readers.push_back({&queue(s), queue(s).given});
    }
};

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return DEVICES; }
    void setCurrentDevice(c10::DeviceIndex device) const override { current_device = device; }
    c10::DeviceIndex getCurrentDevice() const override { return current_device; }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override
    {
        return std::exchange(current_device, int(device));
    }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
    const at::Generator &getDefaultGenerator(c10::DeviceIndex) const override
    {
        return at::detail::getDefaultCPUGenerator();
    }
    c10::Allocator *getPinnedMemoryAllocator() const override { return &pinned; }
    bool isPinnedPtr(const void *address) const override { return is_pinned(address); }
    void resizePrivateUse1Bytes(const c10::Storage &storage, size_t n) const override
    {
        c10::DataPtr made = memory.allocate(n);
        size_t kept = std::min(n, storage.nbytes());
        Queue &q = now(current_device);
        if (kept) {
            char *to = reach(made.get()), *from = reach(storage.data());
            submit(q, [to, from, kept] { memcpy(to, from, kept); });
        }
        storage.set_data_ptr_noswap(std::move(made));
        storage.set_nbytes(n);
    }
};

// ---- Operators -------------------------------------------------------------------------------------------------------

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format)
{
    c10::DeviceGuard guard(c10::device_or_default(device));
    return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                     c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>)
{
    c10::DeviceGuard guard(c10::device_or_default(device));
    return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                             c10::dtype_or_default(dtype));
}

/* Returns the memory of a tensor of the device as a tensor of the processor, which does not keep it. */
at::Tensor seen(const at::Tensor &t)
{
    if (!t.numel()) return at::empty(t.sizes(), t.options().device(c10::kCPU));
    return at::from_blob(reach(t.const_data_ptr()), t.sizes(), t.strides(), t.options().device(c10::kCPU));
}

at::Tensor copy_from(const at::Tensor &from, const at::Tensor &to, bool non_blocking)
{
    at::NoGradGuard no_grad;
    Guard guard(lock);
    at::Tensor source = from.sizes() == to.sizes() ? from : from.expand(to.sizes());
    bool down = to.is_cpu(), up = from.is_cpu();
    const at::Tensor &host = down ? to : from;
    bool direct = (down || up) && host.numel() && is_pinned(host.const_data_ptr());
    if (direct) {
        counts[down ? 0 : 2]++;
        counts[down ? 1 : 3] += host.nbytes();
    }
    if (up) source = direct && non_blocking ? source : source.clone();
    at::Tensor here = up ? source : seen(source), there = down ? to : seen(to);
    Queue &q = now((down ? from : to).device().index());
    submit(q, [here, there] {
        at::NoGradGuard no_grad_here;
        there.copy_(here);
    });
    if (down && !(direct && non_blocking)) q.run(q.given);
    return to;
}

at::Tensor copy_from_and_resize(const at::Tensor &from, const at::Tensor &to)
{
    at::native::resize_(to, from.sizes(), std::nullopt);
    return copy_from(from, to, false);
}

at::Scalar item(const at::Tensor &t) { return t.cpu().item(); }

at::Tensor view(const at::Tensor &t, c10::SymIntArrayRef size)
{
    return at::native::view(t, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor as_strided(const at::Tensor &t, c10::IntArrayRef size, c10::IntArrayRef stride,
                      std::optional<int64_t> offset)
{
    return at::native::as_strided_tensorimpl(t, size, stride, offset);
}

at::Tensor reshape_alias(const at::Tensor &t, c10::IntArrayRef size, c10::IntArrayRef stride)
{
    return at::native::_reshape_alias(t, size, stride);
}

const at::Tensor &resize(const at::Tensor &t, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat> format)
{
    return at::native::resize_(t, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor &set_storage(at::Tensor &t, at::Storage storage, int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride)
{
    at::native::checkSetStorage(t, storage, offset, size, stride);
    t.unsafeGetTensorImpl()->set_storage_offset(offset);
    at::native::resize_impl_cpu_(t.unsafeGetTensorImpl(), size,
                                 stride.data() ? at::OptionalIntArrayRef(stride) : std::nullopt, false);
    return t;
}

at::Tensor &set_whole_storage(at::Tensor &t, at::Storage storage)
{
    int64_t n = storage.nbytes() / t.itemsize();
    return set_storage(t, storage, 0, {n}, {1});
}

at::Tensor &set_tensor(at::Tensor &t, const at::Tensor &source)
{
    return set_storage(t, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

void record_stream(at::Tensor &t, c10::Stream s) { Device().recordDataPtrOnStream(t.storage().data_ptr(), s); }

void fallback(const c10::OperatorHandle &op, torch::jit::Stack *stack) { at::native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m)
{
    m.impl("empty.memory_format", empty);
    m.impl("empty_strided", empty_strided);
    m.impl("as_strided", as_strided);
    m.impl("_reshape_alias", reshape_alias);
    m.impl("view", view);
    m.impl("resize_", resize);
    m.impl("_copy_from", copy_from);
    m.impl("_copy_from_and_resize", copy_from_and_resize);
    m.impl("_local_scalar_dense", item);
    m.impl("set_.source_Tensor", set_tensor);
    m.impl("set_.source_Storage", set_whole_storage);
    m.impl("set_.source_Storage_storage_offset", set_storage);
    m.impl("record_stream", record_stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

C10_REGISTER_GUARD_IMPL(PrivateUse1, Device);
REGISTER_ALLOCATOR(KIND, &memory);

struct Opened {
    Opened()
    {
        open_memory();
        at::RegisterPrivateUse1HooksInterface(new Hooks);
        at::setHostAllocator(KIND, &pinned, 0);
    }
} opened;

} // namespace

extern "C" void standin_use_a_single_stream(int yes) { single = yes; }

/* Returns the counts since the last call. */
extern "C" void standin_take_counts(int64_t out[4])
{
    Guard guard(lock);
    for (int i = 0; i < 4; i++) out[i] = std::exchange(counts[i], 0);
}
