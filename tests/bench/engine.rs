//! `cargo bench`: the benchmark among the examples, which starts its ranks itself. A harness that measures one process
//! has nothing to say about what needs two.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "its output is the result")]

#[path = "../../examples/bench.rs"]
mod program;

fn main() {
    program::main();
}
