//! Limits on a chat template: the size of each text and list, and their total in one rendering.
//!
//! Jinja's steps are counted, but a step can make a text of any length: `{% set s = s ~ s %}` forty times is a few hundred steps
//! and a terabyte. So the operators of a compiled template are replaced by functions that know how much they are about to make,
//! and filters and methods that make more than they are given are checked first.
//!
//! A rendering has its thread to itself, and its counts are the thread's.

use std::cell::Cell;
use std::fmt::{self, Write};
use std::sync::LazyLock;

use minijinja::machinery::{Instruction, Instructions};
use minijinja::value::{Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Expression, State, Value, context};

/// Most bytes of one text or list; a record has no more.
const ONE_BYTES: usize = 16 << 20;
/// Most bytes of all of them together. A loop that adds to a text makes it anew each time.
const ALL_BYTES: usize = 512 << 20;
/// Most bytes written, also into variables and by macros.
const WRITTEN_BYTES: usize = 64 << 20;
const ITEM_BYTES: usize = size_of::<Value>();
/// The widest field of a format.
const FIELD_BYTES: usize = 1 << 16;

thread_local! {
    static MADE: Cell<usize> = const { Cell::new(0) };
    static WRITTEN: Cell<usize> = const { Cell::new(0) };
    static EXCEEDED: Cell<usize> = const { Cell::new(0) };
}

/// Begins a rendering.
pub(crate) fn begin() {
    MADE.set(0);
    WRITTEN.set(0);
}

/// The limit that the last [`ErrorKind::WriteFailure`] of this thread was about.
pub(crate) fn exceeded() -> usize {
    EXCEEDED.get()
}

/// Counts bytes about to be written, and refuses too many.
pub(crate) fn write(value: &Value) -> Result<(), Error> {
    WRITTEN.set(WRITTEN.get().saturating_add(printed_bytes(value, WRITTEN_BYTES)?));
    if WRITTEN.get() <= WRITTEN_BYTES { Ok(()) } else { Err(refuse(WRITTEN_BYTES)) }
}

/// Counts bytes about to be made, and refuses too many.
fn make(bytes: usize) -> Result<(), Error> {
    if bytes > ONE_BYTES {
        return Err(refuse(ONE_BYTES));
    }
    MADE.set(MADE.get().saturating_add(bytes));
    if MADE.get() <= ALL_BYTES { Ok(()) } else { Err(refuse(ALL_BYTES)) }
}

fn refuse(limit_bytes: usize) -> Error {
    EXCEEDED.set(limit_bytes);
    Error::new(ErrorKind::WriteFailure, "too much text")
}

/// Has a template's operators call the functions that [`install`] adds.
pub(crate) fn replace_operators(instructions: &mut Instructions<'_>) {
    let mut at = 0;
    while let Some(instruction) = instructions.get_mut(at) {
        let function = match instruction {
            Instruction::Add => Some(("+", 2)),
            Instruction::StringConcat => Some(("~", 2)),
            Instruction::Mul => Some(("*", 2)),
            Instruction::Slice => Some(("[:]", 4)),
            _ => None,
        };
        if let Some((name, arguments)) = function {
            *instruction = Instruction::CallFunction(name, Some(arguments));
        }
        at += 1;
    }
}

/// Follows a `*`.
pub(crate) const TIMES_ONE: &str = " evenkeel_one *";

/// Adds the functions and the variable that [`replace_operators`] and [`TIMES_ONE`] name.
pub(crate) fn install(environment: &mut Environment<'static>) {
    environment.add_global("evenkeel_one", 1);
    environment.add_function("~", concatenated);
    environment.add_function("+", |a: Value, b: Value| {
        if a.as_str().is_some() && b.as_str().is_some() {
            return concatenated(a, b);
        }
        make(bytes(&a).saturating_add(bytes(&b)))?;
        plainly(&ADD, context! { a, b })
    });
    environment.add_function("*", |a: Value, b: Value| {
        let times = a.as_usize().or(b.as_usize()).unwrap_or(1);
        make(bytes(&a).max(bytes(&b)).saturating_mul(times))?;
        plainly(&MULTIPLY, context! { a, b })
    });
    environment.add_function("[:]", |a: Value, start: Value, stop: Value, step: Value| {
        make(bytes(&a))?;
        plainly(&SLICE, context! { a, start, stop, step })
    });
    for name in FILTERS {
        environment.add_filter(name, move |arguments: Rest<Value>| {
            before(name, &arguments)?;
            let made = PLAIN.empty_state().apply_filter(name, &arguments).map_err(without_place)?;
            make(bytes(&made)).map(|()| made)
        });
    }
    environment.set_unknown_method_callback(|state: &mut State, value, method, arguments| {
        let all: Vec<Value> = std::iter::once(value).chain(arguments).cloned().collect();
        match (method, &all[..]) {
            ("join", [joiner, values]) => before("join", &[values.clone(), joiner.clone()])?,
            _ => before(method, &all)?,
        }
        let made = minijinja_contrib::pycompat::unknown_method_callback(state, value, method, arguments)?;
        make(bytes(&made)).map(|()| made)
    });
}

/// Filters that make a text or a list.
const FILTERS: [&str; 17] = [
    "batch",
    "capitalize",
    "format",
    "indent",
    "join",
    "lines",
    "list",
    "lower",
    "pprint",
    "replace",
    "reverse",
    "slice",
    "sort",
    "split",
    "string",
    "title",
    "upper",
];

/// Refuses calls that would make much of little.
fn before(name: &str, arguments: &[Value]) -> Result<(), Error> {
    let text = |at: usize| arguments.get(at).and_then(Value::as_str).unwrap_or("");
    let given: usize = arguments.iter().map(bytes).fold(0, usize::saturating_add);
    let numbers = || arguments.iter().filter_map(|argument| argument.as_usize()).fold(0, usize::saturating_add);
    make(match name {
        "replace" => text(0).matches(text(1)).count().saturating_mul(text(2).len()).saturating_add(text(0).len()),
        "join" => joined_bytes(arguments)?,
        "format" => {
            let fields = text(0).matches(['%', '{']).count();
            fields.saturating_mul(given.max(FIELD_BYTES)).saturating_add(text(0).len())
        }
        "indent" => (text(0).lines().count() + 1).saturating_mul(numbers()),
        "batch" | "slice" => numbers().saturating_mul(ITEM_BYTES),
        "list" | "reverse" | "sort" => text(0).len().saturating_mul(ITEM_BYTES),
        "string" | "pprint" => arguments.first().map_or(Ok(0), |value| printed_bytes(value, ONE_BYTES))?,
        _ => 0,
    })
}

fn joined_bytes(arguments: &[Value]) -> Result<usize, Error> {
    let Some(values) = arguments.first() else { return Ok(0) };
    let joiner = arguments.get(1).map_or(0, bytes);
    let mut total = 0usize;
    // A text, too, is joined letter by letter. Values that cannot be joined give their own error.
    for value in values.try_iter().into_iter().flatten() {
        total = total.saturating_add(printed_bytes(&value, ONE_BYTES)?).saturating_add(joiner);
        if total > ONE_BYTES {
            break;
        }
    }
    Ok(total)
}

fn concatenated(a: Value, b: Value) -> Result<Value, Error> {
    make(printed_bytes(&a, ONE_BYTES)?.saturating_add(printed_bytes(&b, ONE_BYTES)?))?;
    Ok(Value::from(format!("{a}{b}")))
}

/// The memory of a text or a list, its items aside.
fn bytes(value: &Value) -> usize {
    match value.kind() {
        ValueKind::String | ValueKind::Bytes => value.as_str().map_or_else(|| value.len().unwrap_or(0), str::len),
        _ => value.len().unwrap_or(0).saturating_mul(ITEM_BYTES),
    }
}

/// The length of a printed value: a list can hold the same long text many times.
fn printed_bytes(value: &Value, limit_bytes: usize) -> Result<usize, Error> {
    struct Count {
        bytes: usize,
        limit_bytes: usize,
    }
    impl Write for Count {
        fn write_str(&mut self, text: &str) -> fmt::Result {
            self.bytes += text.len();
            if self.bytes <= self.limit_bytes { Ok(()) } else { Err(fmt::Error) }
        }
    }
    if let Some(text) = value.as_str() {
        return Ok(text.len());
    }
    let mut count = Count { bytes: 0, limit_bytes };
    write!(count, "{value}").map_err(|_| refuse(limit_bytes))?;
    Ok(count.bytes)
}

/// Jinja's own operators and filters.
static PLAIN: LazyLock<Environment<'static>> = LazyLock::new(Environment::new);
static ADD: LazyLock<Expression<'static, 'static>> = LazyLock::new(|| expression("a + b"));
static MULTIPLY: LazyLock<Expression<'static, 'static>> = LazyLock::new(|| expression("a * b"));
static SLICE: LazyLock<Expression<'static, 'static>> = LazyLock::new(|| expression("a[start:stop:step]"));

fn expression(source: &'static str) -> Expression<'static, 'static> {
    PLAIN.compile_expression(source).expect("an expression of Jinja")
}

fn plainly(expression: &Expression<'_, '_>, context: Value) -> Result<Value, Error> {
    expression.eval(context).map_err(without_place)
}

/// An error's line belongs to the template, not to an expression here.
fn without_place(error: Error) -> Error {
    Error::new(error.kind(), error.detail().unwrap_or_default().to_owned())
}
