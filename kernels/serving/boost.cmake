# FUNCREC_BOOST: the folder with Boost's headers (Beast, Asio and JSON; nothing of it is linked), the system's or those that the package
# cmeel-boost brings to Python_EXECUTABLE.
find_package(Python 3.11 QUIET COMPONENTS Interpreter)
if(Python_Interpreter_FOUND)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c "import sysconfig; print(sysconfig.get_path('purelib'), end='')" OUTPUT_VARIABLE packages)
endif()
find_path(FUNCREC_BOOST boost/beast.hpp PATHS "${packages}/cmeel.prefix/include")
set(boost 0)
if(FUNCREC_BOOST)
  file(STRINGS "${FUNCREC_BOOST}/boost/version.hpp" boost REGEX "#define BOOST_VERSION ")
  string(REGEX REPLACE "[^0-9]" "" boost "${boost}")
endif()
if(boost LESS 107500)
  message(FATAL_ERROR "funcrec serving: the headers of Boost 1.75 or later are missing.\n"
    "  try   pip install cmeel-boost, apt-get install libboost1.81-dev, or -DFUNCREC_BOOST=<folder with boost/>")
endif()
