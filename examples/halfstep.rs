// halfstep.h for Rust: declarations of what is used here, and an Optimizer that frees its handle, checks lengths and
// returns errors. Copy the module into your program and change it; halfstep.h explains every call. The program below
// it is examples/train.cpp in Rust, with the same bits: each goes on from the checkpoints of the other.
//
//   rustc --edition 2021 -O halfstep.rs -L native=LIBRARIES -l halfstep_io -l halfstep
//   ./halfstep TEXT DIRECTORY STEPS

mod halfstep {
    use std::ffi::{c_char, c_int, c_void, CStr, CString, NulError};
    use std::{fmt, mem::size_of, ptr};

    pub const ALL_GROUPS: i32 = -1;
    const SLOT_WEIGHT: i32 = 0;
    const ERROR_ARGUMENT: c_int = -10;
    const ERROR_NAME: c_int = -11;
    const NONFINITE: c_int = -50;

    // The library takes a smaller structure for that of an older header, so the sizes are checked here.
    const _: () = assert!(size_of::<Options>() == 48); // sizeof(halfstep_options)
    const _: () = assert!(size_of::<Tensor>() == 224); // sizeof(halfstep_tensor)
    const _: () = assert!(size_of::<SaveOptions>() == 40); // sizeof(halfstep_save_options)
    const _: () = assert!(size_of::<CheckpointInfo>() == 48); // sizeof(halfstep_checkpoint_info)

    #[repr(C)]
    struct Options {
        struct_size: u32,
        threads: i32,
        seed: u64,
        run: *const c_void, // null: the library's own threads
        host: *mut c_void,
        device: *const c_char,
        stream: *mut c_void,
    }

    #[repr(C)]
    struct Tensor {
        struct_size: u32,
        group: i32,
        name: *const c_char,
        id: u64,
        ndim: i32,
        may_be_empty: i32,
        rows: i64,
        row_length: i64,
        part: [i64; 4], // first_row, n_rows, first_column, n_columns
        gradient: *const c_char,
        matrix_rows: i64,
        split: [i64; 16],
    }

    #[repr(C)]
    struct SaveOptions {
        struct_size: u32,
        keep: u32,
        step: u64,
        no_sync: u32,
        no_links: u32,
        newest: u64,
        prune_if: u32,
    }

    #[repr(C)]
    struct CheckpointInfo {
        struct_size: u32,
        fell_back: u32,
        directory: *const c_char,
        step: u64,
        sequence: u64,
        files: u64,
        values: u64,
    }

    // The library's own.
    type Handle = *mut c_void;
    type Saving = *mut c_void;
    type Checkpoint = *mut c_void;

    extern "C" {
        fn halfstep_strerror(code: c_int) -> *const c_char;
        fn halfstep_error_detail(optimizer: Handle) -> *const c_char;
        fn halfstep_create(options: *const Options, optimizer: *mut Handle) -> c_int;
        fn halfstep_destroy(optimizer: Handle);
        fn halfstep_add_group(o: Handle, recipe: *const c_char, group: *mut i32) -> c_int;
        fn halfstep_set_hyper(o: Handle, group: i32, name: *const c_char, value: f64) -> c_int;
        fn halfstep_add_tensor(o: Handle, tensor: *const Tensor, index: *mut i32) -> c_int;
        fn halfstep_allocate_states(o: Handle) -> c_int;
        fn halfstep_step(o: Handle, w: *const *mut c_void, g: *const *const c_void) -> c_int;
        fn halfstep_read_slot(
            o: Handle,
            tensor: i32,
            slot: i32,
            data: *const c_void,
            first: i64,
            n: i64,
            out: *mut f32,
        ) -> c_int;
        fn halfstep_write_slot(
            o: Handle,
            tensor: i32,
            slot: i32,
            data: *mut c_void,
            first: i64,
            n: i64,
            values: *const f32,
        ) -> c_int;
        fn halfstep_memory(
            o: Handle,
            weights: *mut u64,
            gradients: *mut u64,
            extras: *mut u64,
            states: *mut u64,
            fell_back: *mut i32,
        ) -> c_int;

        fn halfstep_begin_checkpoint(
            saving: *mut Saving,
            dir: *const c_char,
            options: *const SaveOptions,
            error: *mut c_char,
            size: usize,
        ) -> c_int;
        fn halfstep_save_optimizer(
            saving: Saving,
            o: Handle,
            weights: *const *mut c_void,
            options: *const c_void,
            error: *mut c_char,
            size: usize,
        ) -> c_int;
        fn halfstep_commit_checkpoint(saving: Saving, error: *mut c_char, size: usize) -> c_int;
        fn halfstep_open_checkpoint(
            checkpoint: *mut Checkpoint,
            path: *const c_char,
            options: *const c_void,
            error: *mut c_char,
            size: usize,
        ) -> c_int;
        fn halfstep_load_optimizer(
            checkpoint: Checkpoint,
            o: Handle,
            weights: *const *mut c_void,
            options: *const c_void,
            error: *mut c_char,
            size: usize,
        ) -> c_int;
        fn halfstep_get_checkpoint_info(c: Checkpoint, info: *mut CheckpointInfo) -> c_int;
        fn halfstep_close_checkpoint(checkpoint: Checkpoint);
    }

    /// A call that failed, with halfstep's text.
    #[derive(Debug)]
    pub struct Error {
        pub code: i32,
        pub text: String,
    }
    pub type Result<T> = std::result::Result<T, Error>;

    impl fmt::Display for Error {
        fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
            write!(out, "{}: {}", copied(unsafe { halfstep_strerror(self.code) }), self.text)
        }
    }
    impl std::error::Error for Error {}
    impl From<NulError> for Error {
        fn from(error: NulError) -> Error {
            Error { code: ERROR_ARGUMENT, text: error.to_string() }
        }
    }

    fn copied(text: *const c_char) -> String {
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }

    /// Fails unless a list of tensors has the lengths that it must have.
    fn check_lengths(what: &str, given: impl Iterator<Item = usize>, wanted: &[usize]) -> Result<()> {
        let given: Vec<usize> = given.collect();
        if given == wanted {
            return Ok(());
        }
        let text = format!("{what} have {given:?} elements; they must have {wanted:?}");
        Err(Error { code: ERROR_ARGUMENT, text })
    }

    /// Makes a call that writes its error, or a note, into a buffer. Returns the note.
    fn noting(call: impl FnOnce(*mut c_char, usize) -> c_int) -> Result<String> {
        let mut buffer = [0 as c_char; 512];
        let code = call(buffer.as_mut_ptr(), buffer.len());
        let text = copied(buffer.as_ptr());
        if code == 0 {
            Ok(text)
        } else {
            Err(Error { code, text })
        }
    }

    /// An optimizer of weights in 16 bits with gradients in fp32. Both stay the caller's.
    pub struct Optimizer {
        handle: Handle,
        elements: Vec<usize>, // of each tensor
        rows: Vec<i64>,
    }

    // A handle belongs to no thread.
    unsafe impl Send for Optimizer {}

    impl Drop for Optimizer {
        fn drop(&mut self) {
            unsafe { halfstep_destroy(self.handle) }
        }
    }

    impl Optimizer {
        pub fn new(seed: u64) -> Result<Optimizer> {
            let options = Options {
                struct_size: size_of::<Options>() as u32,
                threads: 0,
                seed,
                run: ptr::null(),
                host: ptr::null_mut(),
                device: ptr::null(),
                stream: ptr::null_mut(),
            };
            let mut made = Optimizer { handle: ptr::null_mut(), elements: Vec::new(), rows: Vec::new() };
            let code = unsafe { halfstep_create(&options, &mut made.handle) };
            made.check(code)?;
            Ok(made)
        }

        /// Returns the text about the last error or refused step.
        pub fn detail(&self) -> String {
            copied(unsafe { halfstep_error_detail(self.handle) })
        }

        fn check(&self, code: c_int) -> Result<()> {
            if code == 0 {
                Ok(())
            } else {
                Err(Error { code, text: self.detail() })
            }
        }

        pub fn add_group(&mut self, recipe: &str) -> Result<i32> {
            let recipe = CString::new(recipe)?;
            let mut group = 0;
            self.check(unsafe { halfstep_add_group(self.handle, recipe.as_ptr(), &mut group) })?;
            Ok(group)
        }

        /// Sets a hyper-parameter. `group` may be ALL_GROUPS.
        pub fn set(&mut self, group: i32, name: &str, value: f64) -> Result<()> {
            let name = CString::new(name)?;
            self.check(unsafe { halfstep_set_hyper(self.handle, group, name.as_ptr(), value) })
        }

        /// Adds a tensor with the sizes of its dimensions.
        pub fn add_tensor(&mut self, group: i32, name: &str, sizes: &[usize]) -> Result<()> {
            let name = CString::new(name)?;
            let elements: usize = sizes.iter().product();
            let rows = sizes.first().copied().unwrap_or(1);
            let tensor = Tensor {
                struct_size: size_of::<Tensor>() as u32,
                group,
                name: name.as_ptr(),
                id: 0,
                ndim: sizes.len() as i32,
                may_be_empty: 0,
                rows: rows as i64,
                row_length: (elements / rows.max(1)) as i64,
                part: [0; 4],
                gradient: c"f32".as_ptr(),
                matrix_rows: 0,
                split: [0; 16],
            };
            let mut index = 0;
            self.check(unsafe { halfstep_add_tensor(self.handle, &tensor, &mut index) })?;
            self.elements.push(elements);
            self.rows.push(rows as i64);
            Ok(())
        }

        pub fn allocate_states(&mut self) -> Result<()> {
            // Every other length is checked by these two bytes for each element.
            let (bytes, _) = self.memory()?;
            check_lengths(
                "weights in bytes",
                [bytes as usize].into_iter(),
                &[2 * self.elements.iter().sum::<usize>()],
            )?;
            self.check(unsafe { halfstep_allocate_states(self.handle) })
        }

        /// Returns the bytes of weights and of states.
        pub fn memory(&self) -> Result<(u64, u64)> {
            let (mut weights, mut states, none) = (0, 0, ptr::null_mut());
            self.check(unsafe {
                let nobody = ptr::null_mut();
                halfstep_memory(self.handle, &mut weights, none, none, &mut states, nobody)
            })?;
            Ok((weights, states))
        }

        /// Makes one update of every tensor. Returns false, with nothing changed, if a gradient is
        /// not finite.
        pub fn step(&mut self, weights: &mut [Vec<u16>], gradients: &[Vec<f32>]) -> Result<bool> {
            let weights = self.addresses(weights)?;
            check_lengths("gradients", gradients.iter().map(Vec::len), &self.elements)?;
            let gradients: Vec<_> = gradients.iter().map(|g| g.as_ptr().cast()).collect();
            let code = unsafe { halfstep_step(self.handle, weights.as_ptr(), gradients.as_ptr()) };
            if code == NONFINITE {
                return Ok(false);
            }
            self.check(code)?;
            Ok(true)
        }

        fn addresses(&self, weights: &mut [Vec<u16>]) -> Result<Vec<*mut c_void>> {
            check_lengths("weights", weights.iter().map(Vec::len), &self.elements)?;
            Ok(weights.iter_mut().map(|w| w.as_mut_ptr().cast()).collect())
        }

        /// Decodes a weight.
        pub fn read(&self, tensor: usize, stored: &[u16], values: &mut [f32]) -> Result<()> {
            let n = self.elements[tensor];
            check_lengths("a weight and its values", [stored.len(), values.len()].into_iter(), &[n; 2])?;
            let (data, out) = (stored.as_ptr().cast(), values.as_mut_ptr());
            let (rows, tensor) = (self.rows[tensor], tensor as i32);
            self.check(unsafe { halfstep_read_slot(self.handle, tensor, SLOT_WEIGHT, data, 0, rows, out) })
        }

        /// Encodes a weight, to nearest.
        pub fn write(&mut self, tensor: usize, stored: &mut [u16], values: &[f32]) -> Result<()> {
            let n = self.elements[tensor];
            check_lengths("a weight and its values", [stored.len(), values.len()].into_iter(), &[n; 2])?;
            let (data, from) = (stored.as_mut_ptr().cast(), values.as_ptr());
            let (rows, tensor) = (self.rows[tensor], tensor as i32);
            self.check(unsafe { halfstep_write_slot(self.handle, tensor, SLOT_WEIGHT, data, 0, rows, from) })
        }

        /// Saves optimizer and weights into a checkpoint directory, durably. Returns a note, or "".
        pub fn save(&self, dir: &str, step: u64, weights: &mut [Vec<u16>]) -> Result<String> {
            let (dir, weights) = (CString::new(dir)?, self.addresses(weights)?);
            let options = SaveOptions {
                struct_size: size_of::<SaveOptions>() as u32,
                keep: 0,
                step,
                no_sync: 0,
                no_links: 0,
                newest: 0,
                prune_if: 0,
            };
            let (mut saving, at) = (ptr::null_mut(), weights.as_ptr());
            noting(|text, size| unsafe { halfstep_begin_checkpoint(&mut saving, dir.as_ptr(), &options, text, size) })?;
            noting(|text, size| unsafe {
                // The commit fails if the call before it has failed.
                halfstep_save_optimizer(saving, self.handle, at, ptr::null(), text, size);
                halfstep_commit_checkpoint(saving, text, size)
            })
        }

        /// Loads both from there and returns the step, or None if there is no checkpoint.
        pub fn load(&mut self, dir: &str, weights: &mut [Vec<u16>]) -> Result<Option<u64>> {
            let (dir, weights) = (CString::new(dir)?, self.addresses(weights)?);
            let mut checkpoint = ptr::null_mut();
            match noting(|text, size| unsafe {
                halfstep_open_checkpoint(&mut checkpoint, dir.as_ptr(), ptr::null(), text, size)
            }) {
                Err(error) if error.code == ERROR_NAME => return Ok(None),
                opened => opened?,
            };
            let mut info: CheckpointInfo = unsafe { std::mem::zeroed() };
            info.struct_size = size_of::<CheckpointInfo>() as u32;
            let at = weights.as_ptr();
            let loaded = noting(|text, size| unsafe {
                halfstep_load_optimizer(checkpoint, self.handle, at, ptr::null(), text, size)
            });
            unsafe {
                halfstep_get_checkpoint_info(checkpoint, &mut info);
                halfstep_close_checkpoint(checkpoint);
            }
            loaded.map(|_| Some(info.step))
        }
    }
}

use halfstep::{Optimizer, Result, ALL_GROUPS};

const CONTEXT: usize = 4;
const WIDTH: usize = 32;
const INPUTS: usize = CONTEXT * WIDTH;
const HIDDEN: usize = 64;
const BYTES: usize = 128;
const BATCH: usize = 16;
const PARAMETERS: [(&str, &[usize]); 4] = [
    ("embedding.weight", &[BYTES, WIDTH]),
    ("hidden.weight", &[HIDDEN, INPUTS]),
    ("hidden.bias", &[HIDDEN]),
    ("output.weight", &[BYTES, HIDDEN]),
];

struct Trainer {
    text: Vec<u8>,
    optimizer: Optimizer,
    stored: Vec<Vec<u16>>, // BF16, as halfstep steps it
    values: Vec<Vec<f32>>,
    gradients: Vec<Vec<f32>>,
}

/// Returns a random number, and advances the state.
fn draw(state: &mut u64) -> u64 {
    *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
    *state >> 40
}

impl Trainer {
    fn new(text: Vec<u8>) -> Result<Trainer> {
        let mut optimizer = Optimizer::new(1)?;
        let matrices = optimizer.add_group("adamw/bf16-ecc8/int8")?;
        let biases = optimizer.add_group("adamw/bf16-ecc8/f32")?;
        optimizer.set(ALL_GROUPS, "lr", 0.005)?;
        optimizer.set(ALL_GROUPS, "clip_norm", 1.0)?;
        optimizer.set(biases, "weight_decay", 0.0)?;
        for (name, sizes) in PARAMETERS {
            optimizer.add_tensor(if sizes.len() > 1 { matrices } else { biases }, name, sizes)?;
        }
        optimizer.allocate_states()?;
        let (mut random, mut stored, mut values) = (1, Vec::new(), Vec::<Vec<f32>>::new());
        for (i, (_, sizes)) in PARAMETERS.iter().enumerate() {
            let n: usize = sizes.iter().product();
            let scale = 1.0 / (1 << 23) as f32;
            values.push((0..n).map(|_| (draw(&mut random) as f32 * scale - 1.0) * 0.1).collect());
            stored.push(vec![0; n]);
            optimizer.write(i, &mut stored[i], &values[i])?;
        }
        let gradients = values.clone();
        Ok(Trainer { text, optimizer, stored, values, gradients })
    }

    /// Loads the last checkpoint, if there is one, and trains from its step on.
    fn run(&mut self, dir: &str, steps: u64) -> Result<()> {
        let first = self.optimizer.load(dir, &mut self.stored)?.unwrap_or(0);
        self.decode()?;
        for step in first..steps {
            // The batch follows from the step, so that a resumed run has the right data.
            let mut random = step;
            self.gradients.iter_mut().for_each(|g| g.fill(0.0));
            for _ in 0..BATCH {
                let at = draw(&mut random) as usize % (self.text.len() - CONTEXT);
                self.predict(CONTEXT + at, true);
            }
            if !self.optimizer.step(&mut self.stored, &self.gradients)? {
                eprintln!("{}", self.optimizer.detail());
            }
            self.decode()?;
        }
        let note = self.optimizer.save(dir, steps, &mut self.stored)?;
        if !note.is_empty() {
            eprintln!("{note}");
        }
        Ok(())
    }

    fn decode(&mut self) -> Result<()> {
        for (i, values) in self.values.iter_mut().enumerate() {
            self.optimizer.read(i, &self.stored[i], values)?;
        }
        Ok(())
    }

    /// Returns the loss for each byte of the text, in nats.
    fn loss(&mut self) -> f64 {
        let places = CONTEXT..self.text.len();
        let n = places.len() as f64;
        places.map(|at| self.predict(at, false)).sum::<f64>() / n
    }

    /// Returns the loss of the byte at a place. Adds to the gradients if `learn` is set.
    fn predict(&mut self, at: usize, learn: bool) -> f64 {
        let byte = |at: usize| self.text[at] as usize % BYTES;
        let [embedding, first, bias, last] = &self.values[..] else { unreachable!() };
        let (mut x, mut h, mut p) = ([0f32; INPUTS], [0f32; HIDDEN], [0f32; BYTES]);
        for c in 0..CONTEXT {
            let from = byte(at - 1 - c) * WIDTH;
            x[c * WIDTH..][..WIDTH].copy_from_slice(&embedding[from..][..WIDTH]);
        }
        for j in 0..HIDDEN {
            let sum = (0..INPUTS).fold(bias[j], |sum, i| sum + first[j * INPUTS + i] * x[i]);
            h[j] = sum.max(0.0);
        }
        for o in 0..BYTES {
            p[o] = (0..HIDDEN).fold(0.0, |sum, j| sum + last[o * HIDDEN + j] * h[j]);
        }
        let (largest, mut total) = (p.iter().copied().fold(f32::MIN, f32::max), 0.0);
        for value in &mut p {
            *value = (*value - largest).exp();
            total += *value;
        }
        let target = byte(at);
        let loss = -f64::from(p[target] / total).ln();
        if !learn {
            return loss;
        }
        let [to_embedding, to_first, to_bias, to_last] = &mut self.gradients[..] else { unreachable!() };
        let (mut below, mut back) = ([0f32; INPUTS], [0f32; HIDDEN]);
        for o in 0..BYTES {
            let hit = if o == target { 1.0 } else { 0.0 };
            let error = (p[o] / total - hit) / BATCH as f32;
            for j in 0..HIDDEN {
                to_last[o * HIDDEN + j] += error * h[j];
                back[j] += error * last[o * HIDDEN + j];
            }
        }
        for j in (0..HIDDEN).filter(|&j| h[j] != 0.0) {
            to_bias[j] += back[j];
            for i in 0..INPUTS {
                to_first[j * INPUTS + i] += back[j] * x[i];
                below[i] += back[j] * first[j * INPUTS + i];
            }
        }
        for c in 0..CONTEXT {
            for i in 0..WIDTH {
                to_embedding[byte(at - 1 - c) * WIDTH + i] += below[c * WIDTH + i];
            }
        }
        loss
    }
}

/// Returns the loss of a model that knows only how often each byte comes.
fn entropy(text: &[u8]) -> f64 {
    let mut counts = [0f64; 256];
    text.iter().for_each(|&byte| counts[byte as usize] += 1.0);
    let shares = counts.iter().filter(|&&n| n > 0.0).map(|n| n / text.len() as f64);
    -shares.map(|share| share * share.ln()).sum::<f64>()
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().collect();
    let [_, file, dir, steps] = &words[..] else {
        return Err("usage: halfstep TEXT DIRECTORY STEPS".into());
    };
    let text = std::fs::read(file)?;
    if text.len() <= CONTEXT {
        return Err(format!("{file}: no text to learn").into());
    }
    let alone = entropy(&text);
    let mut trainer = Trainer::new(text)?;
    trainer.run(dir, steps.parse()?)?;
    let (loss, (weights, states)) = (trainer.loss(), trainer.optimizer.memory()?);
    println!("loss {loss:.3}, of single bytes {alone:.3}; states take {states} bytes, in fp32 {}", weights * 4);
    Ok(())
}
