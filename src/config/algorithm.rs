//! The setting of the algorithm.

/// Which algorithm runs collectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AlgorithmChoice {
    /// The fastest known.
    Auto,
    /// The one of this name, where it can.
    Named(&'static str),
}

impl AlgorithmChoice {
    /// The values, in words: auto and [all names](crate::algo::names). A test compares them, since nothing here may use those.
    pub(super) const FORM: &'static str = "one of auto, local, hierarchical, numa, recursive_doubling, direct, rabenseifner, \
                                           bruck, van_de_geijn, ring, binomial, chain, dissemination, put, islands, forwarding";

    /// Reads it as it is written.
    pub(super) fn read(text: &str) -> Option<AlgorithmChoice> {
        let mut known = AlgorithmChoice::FORM.trim_start_matches("one of ").split(", ");
        let name = known.find(|name| *name == text)?;
        Some(if name == "auto" { AlgorithmChoice::Auto } else { AlgorithmChoice::Named(name) })
    }

    /// The one that a rank has told: its name, or nothing for the fastest known.
    pub(crate) fn told(name: Option<&str>) -> AlgorithmChoice {
        // Ranks of one build know the same names, and others do not join.
        name.and_then(AlgorithmChoice::read).unwrap_or(AlgorithmChoice::Auto)
    }

    /// Its name; nothing for the fastest known.
    pub fn name(self) -> Option<&'static str> {
        match self {
            AlgorithmChoice::Auto => None,
            AlgorithmChoice::Named(name) => Some(name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::error::InitError;

    fn resolve(variable: &str, hint: &str) -> Result<Option<&'static str>, InitError> {
        let hints = [("algorithm".to_owned(), hint.to_owned())];
        let variable = |name: &str| (name == "NCCLX_RS_ALGORITHM").then(|| variable.to_owned());
        Config::resolve_with(&variable, &hints).map(|config| config.algorithm.name())
    }

    #[test]
    fn a_misspelt_algorithm_is_an_error_that_names_where_it_stands_and_those_that_there_are() {
        for auto in ["", " ", "auto"] {
            assert_eq!([resolve("", auto), resolve(auto, "")], [Ok(None), Ok(None)]);
        }
        assert_eq!(
            [resolve("ring", ""), resolve("ring", "auto"), resolve("", " put ")],
            [Ok(Some("ring")), Ok(None), Ok(Some("put"))]
        );
        for (variable, hint, told) in [
            ("", "rign", "the hint algorithm is `rign`: expected one of auto, local, hierarchical, "),
            ("Ring", "", "NCCLX_RS_ALGORITHM is `Ring`: expected one of auto, local, hierarchical, "),
            ("", "one of auto", "the hint algorithm is `one of auto`: expected "),
            ("", "ring, chain", "the hint algorithm is `ring, chain`: expected "),
        ] {
            let error = resolve(variable, hint).unwrap_err().to_string();
            assert!(error.starts_with(told) && error.ends_with(", islands, forwarding"), "{error}");
        }
    }

    #[test]
    fn what_a_rank_tells_is_what_it_reads() {
        let names = [None, Some("auto"), Some("chain")].map(|name| AlgorithmChoice::told(name).name());
        assert_eq!(names, [None, None, Some("chain")]);
    }
}
