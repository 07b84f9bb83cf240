#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ncclx_rs::fuzz::run("rails", bytes));
