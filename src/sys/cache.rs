//! How large a core's caches are.

use std::fs;
use std::sync::OnceLock;

/// The bytes of a core's second-level cache, as the kernel tells it of the first one, 4 MiB at most: more are not a core's own. 1 MiB
/// where it does not tell.
pub(crate) fn second_level_bytes() -> usize {
    static BYTES: OnceLock<usize> = OnceLock::new();
    *BYTES.get_or_init(|| {
        let told = |of: usize, what: &str| {
            fs::read_to_string(format!("/sys/devices/system/cpu/cpu0/cache/index{of}/{what}")).ok()
        };
        let second = (0..8).find(|of| told(*of, "level").is_some_and(|level| level.trim() == "2"));
        let size = second.and_then(|of| parse(&told(of, "size")?));
        size.map_or(1 << 20, |size| size.min(4 << 20))
    })
}

/// A size as the kernel writes it, `2048K`.
fn parse(told: &str) -> Option<usize> {
    let told = told.trim();
    let (digits, unit) = match told.strip_suffix(['K', 'M']) {
        Some(digits) if told.ends_with('M') => (digits, 1 << 20),
        Some(digits) => (digits, 1 << 10),
        None => (told, 1),
    };
    digits.parse::<usize>().ok().filter(|size| *size > 0)?.checked_mul(unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_the_kernel_writes_them() {
        let sizes = ["2048K\n", "1M", "512", "", "0K", "K", "manyK", "18446744073709551615K"].map(parse);
        assert_eq!(sizes, [Some(2 << 20), Some(1 << 20), Some(512), None, None, None, None, None]);
        assert!(second_level_bytes() > 0);
    }
}
