// Boost.JSON, compiled here: only its headers are needed.
#include <boost/json/src.hpp>
